"""`make soak`: what must hold when things go wrong, counted. Each part resumes, and keeps its book in results/soak/.

python -m tests.soak                 all parts
python -m tests.soak kill resume     some of them
"""

from __future__ import annotations

import argparse
import importlib
import sys

from tests.soak.book import Book

PARTS = {  # part: (module, function, promise)
    "kill": ("faults", "kill", "100 of 100 end within 10 s of the SIGKILL (median 5), nothing left; named in 99"),
    "silence": ("faults", "silence", "20 of 20 end within deadline + 5 s, nothing left; named in 19"),
    "hiccup": ("faults", "hiccup", "10 of 10 finish, bit-identical to the undisturbed run"),
    "resume": ("faults", "resume", "10 of 10 kill points give the undisturbed hash, in ring, ddp and pipeline"),
    "torn": ("torn", "torn", "50 of 50 loadable after a SIGKILL inside a checkpoint write, nothing complete lost"),
    "hostile": ("hostile", "hostile", "500 of 500 refused with a sentence or run; no traceback, stray file or shell"),
    "garbage": ("garbage", "garbage", "the run finishes through 200 garbage connections to the rendezvous"),
    "short": ("faults", "short", "100 of 100 short runs end well and leave nothing"),
}


def main() -> int:
    """Run the parts; exit code 1 when one misses its promise."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none means all")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    good = True
    for part in options.parts or PARTS:
        module, function, promise = PARTS[part]
        book = Book(part, promise)
        book.run(getattr(importlib.import_module(f"tests.soak.{module}"), function)())
        good = book.close() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
