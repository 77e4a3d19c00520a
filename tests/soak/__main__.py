"""`make soak`: count how often the testbed ends as it must when something fails.

    make soak                      all parts
    make soak ARGS="kill resume"   some parts
Outcomes are written to results/soak/PART.json after each case. A soak resumes: cases that are already done at this
commit are skipped.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from testbed.control.cli.main import interrupt_on_signals
from testbed.control.runs.locks import reserve_machine
from tests.soak.faults import SILENCE_LIMIT_S, followed_by_plain_run
from tests.soak.outcomes import Outcomes, Promise

CLEAN = {"left": 0, "tabled": 0}  # a case leaves nothing behind, and no table shows an unfinished run
NEXT_STARTS, NOTHING_LEFT = {"started": 1}, {"left": 0}  # for cases that are not runs themselves
IN_TIME = "end within 10 s of"
PARTS = {  # part: (module, function, promise). A module is imported when its part runs, because some import torch
    "kill": (
        "faults",
        "kill",
        Promise(
            f"100 of 100 {IN_TIME} the SIGKILL (median 5), 20 moments in each of five modes,"
            " every fifth near a checkpoint; nothing left; named in 99",
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
            most={"most_seconds": SILENCE_LIMIT_S, **CLEAN},
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
            "30 of 30 kill points give the undisturbed hash: 10 in ring, ddp and pipeline each; every third resumed"
            " by hand; from a checkpoint wherever there was one",
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
    "sequences": (
        "sequences",
        "sequences",
        Promise(
            "200 of 200 random sequences of 2 to 5 faults: recovered with the undisturbed hash, or ended in time with"
            " the retries used and the stopped rank named; records whole, nothing left",
            cases=200,
            least={"started": 200, "recovered": 100, "injected": 300},
            most={"minutes": 240, **CLEAN},
        ),
    ),
    "torn": (
        "torn",
        "torn",
        Promise(
            "50 of 50 loadable after a SIGKILL inside a checkpoint write, nothing complete lost",
            cases=50,
            least=NEXT_STARTS,
            most=NOTHING_LEFT,
        ),
    ),
    "hostile": (
        "hostile",
        "hostile",
        Promise(
            "500 of 500 refused with a sentence or run; no traceback, stray file or program,"
            " no live script or control character in the output",
            cases=500,
            also=("testbed/report",),
            least=NEXT_STARTS,
            most=NOTHING_LEFT,
        ),
    ),
    "garbage": (
        "garbage",
        "garbage",
        Promise(
            "6 of 6 runs finish through 200 garbage connections to rendezvous or heartbeat, while ranks meet or train",
            cases=6,
            least=NEXT_STARTS,
            most=NOTHING_LEFT,
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
    """Run the parts. Return exit code 1 if one misses a limit of its promise."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none means all")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    good = True
    with reserve_machine(print):  # no other run starts meanwhile
        for part in options.parts or PARTS:
            module, function, promise = PARTS[part]
            outcomes = Outcomes(part, promise)
            cases = getattr(importlib.import_module(f"tests.soak.{module}"), function)()
            outcomes.run(followed_by_plain_run(cases))
            good = outcomes.close() and good
    return 0 if good else 1


if __name__ == "__main__":
    interrupt_on_signals()
    sys.exit(main())
