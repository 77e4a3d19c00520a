"""`make bench`: every speed this project promises, measured as a ratio inside one run, beside its limit.

    make bench                     all parts
    make bench ARGS="loop start"   some of them
Results go to bench.json as well. Do nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.bench import collective, compose, hosts, loop, start
from tests.bench.figures import Figure

PARTS = {
    "loop": loop.measure,
    "start": start.measure,
    "collective": collective.measure,
    "compose": compose.measure,
    "hosts": hosts.measure,
}


def main() -> int:
    """Measure, print, write; exit code 1 when a limit is missed."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none means all")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    figures: list[Figure] = []
    for part in options.parts or PARTS:
        print(f"{part} ...", flush=True)
        begun = time.monotonic()
        for figure in PARTS[part]():
            print(f"  {figure}", flush=True)
            figures.append(figure)
        print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
    options.out.write_text(json.dumps([figure.as_dict() for figure in figures], indent=1) + "\n")
    missed = [figure for figure in figures if not figure.met]
    print(f"{len(figures) - len(missed)} of {len(figures)} limits met; all figures are in {options.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
