"""`make soak`: what must hold when things go wrong, counted. Each part resumes, and keeps its book in results/soak/.

python -m tests.soak                 all parts
python -m tests.soak kill resume     some of them
"""

from __future__ import annotations

import argparse
import importlib
import sys

from testbed.control.runs.locks import reserve_machine
from tests.soak.book import Book, Promise
from tests.soak.faults import followed
from tests.soak.runs import DEADLINE

CLEAN = {"left": 0, "tabled": 0}  # after every case: nothing of it is there, and no table shows half a run
NEXT = {
    "least": {"started": 1},
    "most": {"left": 0},
}  # of cases that are no runs: nothing left, and the next run starts
IN_TIME = "end within 10 s of"
PARTS = {  # part: (module, function, promise)
    "kill": (
        "faults",
        "kill",
        Promise(
            f"100 of 100 {IN_TIME} the SIGKILL (median 5), every fifth near a checkpoint; nothing left; named in 99",
            cases=100,
            least={"named": 99, "started": 100},
            most={"most_seconds": 10, "median_seconds": 5, **CLEAN},
        ),
    ),
    "silence": (
        "faults",
        "silence",
        Promise(
            f"20 of 20 {IN_TIME} the fault (deadline + 5), nothing left, the next run starts; named in 19",
            cases=20,
            least={"named": 19, "started": 20},
            most={"most_seconds": DEADLINE + 5, **CLEAN},
        ),
    ),
    "hiccup": (
        "faults",
        "hiccup",
        Promise(
            "10 of 10 finish, bit-identical to the undisturbed run",
            cases=10,
            least={"identical": 10, "started": 10},
            most=CLEAN,
        ),
    ),
    "resume": (
        "faults",
        "resume",
        Promise(
            "10 of 10 kill points give the undisturbed hash, in ring, ddp and pipeline; every third resumed by hand;"
            " from a checkpoint wherever there was one",
            cases=30,
            least={"identical": 30, "started": 30, "by_hand": 10, "resumed": 25},
            most=CLEAN,
        ),
    ),
    "containers": (
        "faults",
        "containers",
        Promise(
            f"in containers: 5 of 5 {IN_TIME} the fault, named; 2 bit-identical, 1 plain; no container or network left",
            cases=8,
            least={"named": 5, "identical": 2, "started": 8, "resumed": 1},
            most={"most_seconds": 10, "minutes": 6, **CLEAN},
        ),
    ),
    "torn": (
        "torn",
        "torn",
        Promise("50 of 50 loadable after a SIGKILL inside a checkpoint write, nothing complete lost", cases=50, **NEXT),
    ),
    "hostile": (
        "hostile",
        "hostile",
        Promise(
            "500 of 500 refused with a sentence or run; no traceback, stray file or shell, no word obeyed",
            cases=500,
            also=("testbed/report",),
            **NEXT,
        ),
    ),
    "garbage": (
        "garbage",
        "garbage",
        Promise(
            "6 of 6 runs finish through 200 garbage connections to rendezvous or heartbeat, while ranks meet or train",
            cases=6,
            **NEXT,
        ),
    ),
    "short": (
        "faults",
        "short",
        Promise(
            "100 of 100 short runs end well and leave nothing", cases=100, least={"started": 100}, most={"left": 0}
        ),
    ),
}


def main() -> int:
    """Run the parts; exit code 1 when one misses a limit of its promise."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none means all")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    good = True
    with reserve_machine():  # its runs then share the machine with nobody but each other
        for part in options.parts or PARTS:
            module, function, promise = PARTS[part]
            book = Book(part, promise)
            book.run(followed(getattr(importlib.import_module(f"tests.soak.{module}"), function)()))
            good = book.close() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
