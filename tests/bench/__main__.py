"""`make bench`: every speed this project promises, measured as a ratio inside one run, beside its limit.

    make bench                     all parts
    make bench ARGS="loop start"   some of them
    make bench ARGS=--resume       go on where an earlier one stopped
Results go to bench.json as well, part by part. Do nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from testbed.spec.folder import write_whole
from tests.bench import codecs, collective, compose, growth, hosts, loop, start, step, trust, volume

PARTS = {
    "loop": loop.measure,
    "start": start.measure,
    "collective": collective.measure,
    "compose": compose.measure,
    "growth": growth.measure,
    **{f"step-{rate}": partial(step.measure_at, rate) for rate in step.PLANS},
    "bytes": volume.measure,
    "recorder": trust.recorder,
    "control": trust.control,
    "straggler": trust.straggler,
    "hosts": hosts.measure,
    "codecs": codecs.measure,
}


def main() -> int:
    """Measure, print, write; exit code 1 when a limit is missed."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none means all")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--resume", action="store_true", help="leave out the parts that are in the file already")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    found = _load(options.out) if options.resume else {}
    for part in options.parts or PARTS:
        if part in found:
            print(f"{part}: measured before", flush=True)
            continue
        print(f"{part} ...", flush=True)
        begun = time.monotonic()
        found[part] = []
        for figure in PARTS[part]():
            print(f"  {figure}", flush=True)
            found[part].append(figure.as_dict())
        print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
        write_whole(options.out, json.dumps(found, indent=1) + "\n")
    figures = [figure for part in found.values() for figure in part]
    met = sum(figure["met"] for figure in figures)
    print(f"{met} of {len(figures)} limits met; all figures are in {options.out}")
    return 0 if met == len(figures) else 1


def _load(path: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
