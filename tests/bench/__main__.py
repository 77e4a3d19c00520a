"""`make bench`: every speed this project promises, measured as a ratio inside one run, beside its limit.

    make bench                     all parts
    make bench ARGS="loop start"   some of them
    make bench ARGS=--resume       go on where an earlier one of the same code stopped
Results go to results/bench.json as well, part by part, with the commit they were made from; other parts' stay. Do
nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from testbed.results.folder import write_whole
from tests.bench import codecs, collective, compose, exact, growth, hosts, loop, profile, start, step, trust, volume
from tests.bench.figures import MEASURED, kept_limits
from tests.support.provenance import ROOT, code_commit, current, throughout

PARTS = {
    "loop": loop.measure,
    "start": start.measure,
    "collective": collective.measure,
    "compose": compose.measure,
    "growth": growth.measure,
    **{f"step-{rate}": partial(step.measure_at, rate) for rate in step.PLANS},
    "bytes": volume.measure,
    "exact": exact.measure,
    "profile": profile.measure,
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
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "bench.json")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has of the present commit")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    kept, chosen, commit = _load(options.out), options.parts or list(PARTS), _commit()
    for part in chosen:
        if options.resume and part in kept and current(kept[part]["commit"], commit):
            print(f"{part}: measured before", flush=True)
            continue
        print(f"{part} ...", flush=True)
        before, begun, figures = _commit(), time.monotonic(), []
        for figure in PARTS[part]():
            print(f"  {figure}", flush=True)
            figures.append(figure.as_dict())
        print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
        kept[part] = {"commit": throughout(commit, before, _commit()), "figures": figures}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    met = kept_limits(figure for part in chosen for figure in kept[part]["figures"])
    print(f"{sum(met)} of {len(met)} limits met; all figures are in {options.out}")
    return 0 if all(met) else 1


def _commit() -> str:
    """Asked before and after each part: workers are started from the tree as it is then, this process is older."""
    return code_commit(*MEASURED)


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
