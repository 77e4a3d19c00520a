"""`make bench`: measure speeds as ratios inside one run, and compare each with its limit.

    make bench                     all parts but models, sizes, first-layers and thread-class
    make bench ARGS="loop start"   some parts; `attach` means all parts whose names begin with `attach-`
    make bench ARGS=--resume       skip the parts that are already measured at this commit
    make bench ARGS=quick          10 minutes: is this tree slower than the committed figures? (tests/bench/quick.py)
Results are written to results/bench.json after each part, with the commit, the machine and its load before it; results
of other parts are kept. Before each part it prints how long that one and the rest took last time; for a part that was
never timed, how long is expected. Do not use the machine for anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from testbed.control.cli.main import interrupt_on_signals
from testbed.results.folder import write_whole
from testbed.spec.errors import Interrupted, TestbedError
from tests.bench import attach, codecs, collectives, containers, exact, instrument, models, overhead, step
from tests.bench.figures import MEASURED, Figure, limits_met
from tests.support.provenance import ROOT, code_commit, commit_of_all, current, machine

PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "loop": overhead.loop,
    "start": overhead.start,
    "waiting": overhead.waiting,
    "collective": collectives.collective,
    "compose": containers.compose,
    "growth": collectives.growth,
    "uplinks": collectives.uplinks,
    **{f"step-{rate}": partial(step.measure_at, rate) for rate in step.PLANS},
    "bytes": step.count_bytes,
    "exact": exact.measure,
    "profile": step.profile,
    "recorder": instrument.recorder,
    "control": instrument.control,
    "straggler": instrument.straggler,
    "hosts": containers.hosts,
    "codecs": codecs.measure,
    "transport": models.transport,
    **models.parts(),
    **models.size_parts(),
    "first-layers": models.first_layers,
    "thread-class": models.thread_class,
    "attach-cost": attach.cost,
    "attach-ddp": attach.ddp,
    "attach-instead": attach.instead,
}
FOR_A_CHANGE = ("first-layers", "thread-class")  # they have no limits: they are for a change of what they compare
ONLY_BY_NAME = (*models.parts(), *models.size_parts(), *FOR_A_CHANGE)  # `make measure` takes the models and sizes, too
EXPECTED_MINUTES = {  # on two cores, of a part that was never timed; `step` is for each part `step-...`
    **{"waiting": 5, "collective": 4, "compose": 6, "growth": 3, "step": 10, "bytes": 4, "exact": 4, "profile": 4},
    **{"recorder": 5, "control": 4, "straggler": 6, "hosts": 8, "codecs": 12, "transport": 2, "models": 5, "sizes": 3},
    **{"first-layers": 15, "thread-class": 15, "attach-cost": 5, "attach": 2},
}


def main() -> int:
    """Measure, print and write the parts. Return exit code 1 if a limit is missed or a part cannot be measured."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, formatter_class=form)
    none = f"none means all but {' and '.join(('models', 'sizes', *FOR_A_CHANGE))}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; {none}")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "bench.json")
    parser.add_argument("--resume", action="store_true", help="skip the parts that the file has at the present commit")
    options = parser.parse_args()
    if options.parts == ["quick"]:
        from tests.bench import quick  # it imports this module

        return quick.main()
    unknown = [part for part in options.parts if not _named(part)]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    chosen = [part for name in options.parts for part in _named(name)]
    chosen = chosen or [part for part in PARTS if part not in ONLY_BY_NAME]
    kept, commit, failed = _load(options.out), _commit(), list[str]()
    done = [part for part in chosen if options.resume and part in kept and current(kept[part]["commit"], commit)]
    for part in done:
        print(f"{part}: already measured at this commit", flush=True)
    todo = [part for part in chosen if part not in done]
    for number, part in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {part}, {took([part], kept)}; then {took(todo[number:], kept)}", flush=True)
        before, begun, figures, load = _commit(), time.monotonic(), [], os.getloadavg()[0]
        try:
            for figure in PARTS[part]():
                print(f"  {figure}", flush=True)
                figures.append(figure.as_dict())
        except Interrupted:
            raise
        except (SystemExit, Exception) as error:  # the parts after it may still be measured
            print(f"  {part} is not measured: {reason(error)}", flush=True)
            failed.append(part)
            continue
        seconds = round(time.monotonic() - begun)
        print(f"  ({seconds} s)", flush=True)
        facts = {"commit": commit_of_all(commit, before, _commit()), "load": round(load, 2), "seconds": seconds}
        facts["machine"] = machine()
        kept[part] = facts | {"figures": figures}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    met = limits_met(figure for part in chosen if part not in failed for figure in kept[part]["figures"])
    print(f"{sum(met)} of {len(met)} limits met; all figures are in {options.out}")
    if failed:
        print(f"not measured: {', '.join(failed)}. Read why above, then measure again with --resume.")
    return 1 if failed or not all(met) else 0


def reason(error: BaseException) -> str:
    """Return the message of a refusal; of other errors the traceback, and what a failed command wrote to stderr."""
    if isinstance(error, SystemExit | TestbedError):
        return str(error)
    written = getattr(error, "stderr", None) or ""
    return "".join([*traceback.format_exception(error), str(written)]).strip()


def took(parts: Sequence[str], kept: dict[str, Any]) -> str:
    """How long these parts take: `about 12 minutes and 2 that were never timed`."""
    minutes = [minutes_of(part, kept.get(part, {})) for part in parts]
    known = [each for each in minutes if each is not None]
    unknown = len(minutes) - len(known)
    return f"about {sum(known):.0f} minutes" + (f" and {unknown} that were never timed" if unknown else "")


def minutes_of(part: str, stored: dict[str, Any]) -> float | None:
    """How long a part took last time, or is expected to take; None if neither is known."""
    if "seconds" in stored:
        return float(stored["seconds"]) / 60
    return EXPECTED_MINUTES.get(part, EXPECTED_MINUTES.get(part.partition("-")[0]))


def _named(name: str) -> list[str]:
    """The part of this name, or all parts `name-...`."""
    return [part for part in PARTS if part == name or part.startswith(f"{name}-")]


def _commit() -> str:
    """Read before and after each part, because workers load the tree as it is when they start."""
    return code_commit(*MEASURED)


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    interrupt_on_signals()
    sys.exit(main())
