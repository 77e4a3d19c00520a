"""Random sequences of faults: 2 to 5 faults of any kind, at random moments of one run, with random numbers of retries.

What was drawn decides nothing. `verdict` reads what the run left (the history of its faults, its records, its exit
code) and returns what is wrong with it, so the same rules hold for every sequence:

- an attempt with a fault that no rank survives fails, within SILENCE_LIMIT_S of it; one without a fault that can stop
  a rank does not fail
- a failed attempt names a rank that a fault had stopped; the only one, or the first where it was stopped at once and
  well before the others
- a run that ended well has the parameters of the undisturbed run, every step of every rank, and is in the tables
- a run that ended badly has used all of its retries, has the exit code of a failed rank, and is in no table
- every line of every file can be read, nothing is left, and the next run starts
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from testbed.results.conclude import Summary
from testbed.results.faults import FaultHistory, read_history
from testbed.results.folder import RunFolder
from testbed.results.records import Step, read
from testbed.spec.errors import RankFailed, TestbedError
from testbed.spec.fault import FAULT_KINDS, Fault, kinds_on
from tests.soak.faults import KILL_MODES, NODES, SILENCE_LIMIT_S, References, on_engine, run_flags
from tests.soak.outcomes import Cases, Outcome
from tests.soak.runs import DEADLINE_S, Run, make_scratch, remove, run_testbed

STEPS, CHECKPOINT_EVERY = 100, 10
LONGEST_S = 8.0  # of a fault that is reverted: some are longer than the deadline of 5 s
AT_ONCE = ("kill", "exit", "oom", "disk-full")  # the rank ends by itself; the others notice it without a deadline
SILENT = ("pause", "cut")  # the others notice it at their deadline
SLOWING = ("rate", "slow")  # no rank ends
TIMEOUT_S = 300.0  # of a run with up to five retries
UNSEEN_STEPS = 20  # that the controller may not have seen yet when it injects a fault
MARGIN_S = 1.0  # between a fault and what other ranks and the controller notice of it
NAMED = re.compile(r"\brank (\d+) \(node\d+\)")  # at the beginning of a message about a failed rank


def sequences(count: int = 200) -> Cases:
    """Every mode in turn; every fourth run in containers, the others on namespaces."""
    references: References = {}
    for seed in range(count):
        mode, substrate = KILL_MODES[seed % len(KILL_MODES)], "compose" if seed % 4 == 3 else "netns"
        faults, retries = draw(seed, substrate)
        base = run_flags(mode, STEPS, substrate)
        flags = [flag for fault in faults for flag in ("--fault", str(fault))]
        flags += ["--retries", str(retries), "--set", f"checkpoint={CHECKPOINT_EVERY}"]
        case = partial(sequence_case, base, flags, references)
        name = f"seed {seed} {mode} {substrate} {' '.join(map(str, faults))} retries {retries}"
        yield name, on_engine(case) if substrate == "compose" else case


def draw(seed: int, substrate: str) -> tuple[list[Fault], int]:
    """Return the faults of a sequence, and its retries: often enough for all faults, sometimes too few."""
    rng = random.Random(f"sequence {seed}")
    faults = [_draw_fault(rng, kinds_on(substrate)) for _ in range(rng.randint(2, 5))]
    return faults, len(faults) if rng.random() < 0.75 else rng.randrange(len(faults))


def _draw_fault(rng: random.Random, kinds: Sequence[str]) -> Fault:
    kind = rng.choice(kinds)
    values: dict[str, Any] = {"kind": kind, "rank": rng.randrange(NODES)}
    values |= {"step": rng.randrange(STEPS)} if rng.random() < 0.5 else {"after": rng.randrange(4000) / 1000}
    if FAULT_KINDS[kind].lasting and (kind not in SILENT or rng.random() < 0.75):
        values["lasts"] = rng.randrange(200, int(LONGEST_S * 1000)) / 1000
    if kind == "rate":
        values["rate"] = rng.choice((10, 20, 50)) * 1_000_000
    if kind == "slow":
        values["cpus"] = rng.choice((0.25, 0.5))
    return Fault(**values)


def sequence_case(base: list[str], flags: list[str], references: References) -> Outcome:
    """Run the sequence; it is ok if the verdict is empty."""
    folder, reference = make_scratch(), " ".join(base)
    try:
        if reference not in references:
            references[reference] = run_testbed(*base, out=folder / "reference").final_hash()
        run = run_testbed(*base, *flags, out=folder / "r", timeout_s=TIMEOUT_S)
        wrong, left, started = verdict(run, references[reference]), run.left(), run.started()
        injected = len(run.events("injected"))
        outcome: Outcome = {"ok": not wrong and not left and started, "code": run.code, "injected": injected}
        outcome |= {"attempts": len(run.events("again")) + 1, "recovered": run.code == 0, "left": len(left)}
        outcome |= {"started": started, "tabled": run.code != 0 and run.in_table()}
        return outcome if outcome["ok"] else outcome | {"wrong": wrong, "what": left, "said": run.output[-1500:]}
    finally:
        remove(folder)


# --- the checker -----------------------------------------------------------------------------------------------------


class Injected(NamedTuple):
    """A fault, when it was injected, and how many steps the controller had seen of its rank."""

    fault: Fault
    at: float
    step: int


@dataclass(frozen=True)
class Attempt:
    """What the history says of one attempt."""

    faults: list[Injected]
    failed: float | None  # when the first rank ended without success
    end: float | None  # when the last rank ended, or all were started again

    @property
    def candidates(self) -> list[Injected]:
        """Faults that can have stopped a rank, injected before the first rank ended."""
        silence = sum(fault.lasts or 0.0 for fault, _, _ in self.faults if fault.kind in (*SILENT, *SLOWING))
        long = silence > DEADLINE_S / 2  # slower links and several pauses add up, and TCP waits longer after a cut
        stopping = [each for each in self.faults if _is_fatal(each.fault) or (each.fault.kind in SILENT and long)]
        return [each for each in stopping if self.failed is None or each.at <= self.failed + MARGIN_S]

    @property
    def survived(self) -> list[Fault]:
        """Faults that no rank survives, of an attempt that ended well; a kill also after the last step."""
        fatal = [each for each in self.candidates if _is_fatal(each.fault)]
        return [each.fault for each in fatal if each.fault.kind == "kill" or each.step <= STEPS - UNSEEN_STEPS]


def _is_fatal(fault: Fault) -> bool:
    """True if no rank survives the fault in a run that still has steps to do."""
    return fault.kind in AT_ONCE or (fault.kind in SILENT and (fault.lasts is None or fault.lasts > SILENCE_LIMIT_S))


def verdict(run: Run, reference: str | None) -> list[str]:
    """Return one line for everything that is wrong with the run; an empty list if nothing is."""
    try:
        history, notes = read_history(run.folder), Summary.read(run.folder).notes
        wrong = [line for rank in range(NODES) for line in _wrong_steps(run.folder, rank, run.code == 0)]
    except TestbedError as error:
        return [f"a file cannot be read: {error}"]
    attempts = list(_attempts(history))
    told = [note.partition(": ")[2] for note in notes if note.startswith("an attempt failed: ")]
    told += [] if run.code == 0 else [run.output.partition("testbed: ")[2]]
    for number, (attempt, message) in enumerate(zip(attempts, [*told, None], strict=False), start=1):
        wrong += [f"attempt {number}: {line}" for line in _wrong_attempt(attempt, message)]
    if run.code == 0:
        wrong += [] if run.status == "ok" else [f"exit code 0, but its status is {run.status}"]
        same = reference is not None and run.final_hash() == reference
        wrong += [] if same else [f"parameters {run.final_hash()}, undisturbed {reference}"]
        wrong += [] if run.in_table() else ["it ended well and is in no table"]
    else:
        wrong += [] if run.code == RankFailed.exit_code else [f"exit code {run.code}"]
        wrong += [] if run.status == "failed" else [f"its status is {run.status}"]
        wrong += ["it failed and is in a table"] if run.in_table() else []
        retries = run.folder.read_spec().retries
        wrong += [] if len(attempts) == retries + 1 else [f"{len(attempts)} attempts with {retries} retries"]
    return wrong


def _attempts(history: FaultHistory) -> Iterator[Attempt]:
    for events in history.attempts:
        found = [each for each in events if each["event"] == "injected"]
        faults = [Injected(Fault.parse(each["fault"]), float(each["begun"]), int(each["step"])) for each in found]
        failures = [float(each["at"]) for each in events if each["event"] == "ended" and each["code"]]
        ends = [float(each["at"]) for each in events if each["event"] in ("ended", "again")]
        yield Attempt(faults, min(failures, default=None), max(ends, default=None))


def _wrong_attempt(attempt: Attempt, message: str | None) -> list[str]:
    """`message`: what was said of its failure; None if it ended well."""
    candidates = attempt.candidates
    if message is None:
        return [f"it survived {fault}" for fault in attempt.survived]
    late = [
        f"it ended {attempt.end - at:.1f} s after {fault}"
        for fault, at, _ in candidates
        if _is_fatal(fault) and attempt.end is not None and attempt.end - at > SILENCE_LIMIT_S
    ]
    named = NAMED.match(message)
    if named is None:
        return [*late, f"no rank is named in {message[:120]!r}"]
    allowed = {each.fault.rank for each in candidates}
    first, later = candidates[:1], candidates[1:]
    if first and first[0].fault.kind in AT_ONCE and all(each.at - first[0].at > MARGIN_S for each in later):
        allowed = {first[0].fault.rank}
    if int(named[1]) not in allowed:
        late.append(
            f"rank {named[1]} is named; stopped by a fault: {sorted(rank for rank in allowed if rank is not None)}"
        )
    return late


def _wrong_steps(folder: RunFolder, rank: int, whole: bool) -> list[str]:
    """Read every record of all attempts. The steps of one attempt follow each other; `whole`: no step is missing."""
    found: set[int] = set()
    wrong = []
    for path in (*folder.attempts(rank).values(), folder.records(rank)):
        steps = [record.step for record in read(path) if isinstance(record, Step)]
        wrong += [f"{path.name}: step {b} follows step {a}" for a, b in pairwise(steps) if b != a + 1]
        found.update(steps)
    missing = sorted(set(range(STEPS)) - found) if whole else []
    return wrong + ([f"rank {rank}: steps {missing[:5]} are missing"] if missing else [])
