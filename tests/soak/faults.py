"""Runs with injected faults: killed, frozen, cut off, disturbed for a moment, resumed; and runs without any."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from testbed.control.substrates import engine
from testbed.spec.errors import RankFailed, Unavailable
from tests.soak.outcomes import UNAVAILABLE, Cases, Outcome
from tests.soak.runs import BATCH, DEADLINE_S, SMALL, left_by_this_process, make_scratch, remove, run_testbed

KILL_MODES = ("gather", "allreduce", "ring", "ddp", "ring/bucket:2MiB/pipeline")
RESUME_MODES = ("ring", "ddp", "ring/bucket:2MiB/pipeline")
MORE_MODES = ("tree", "halving", "server", "ring/every:4", "allreduce/bucket:100KB/overlap")
NODES = 4
KILL_LIMIT_S, SILENCE_LIMIT_S = 10.0, DEADLINE_S + 5  # from the fault to the end of the run
ENDLESS, HICCUP_STEPS, RESUME_STEPS, PLAIN_STEPS = 1_000_000, 200, 100, 20
BUSY_STEPS, CHECKPOINT_EVERY = 30, 5  # of runs that are killed near a checkpoint
CHECKPOINT = "checkpoint="  # the setting; a number of steps follows

References = dict[str, str | None]  # flags of an undisturbed run: the hash of its parameters


def run_flags(mode: str, steps: int, substrate: str) -> list[str]:
    network = [] if substrate == "process" else ["--rate", "100mbit"]
    return [*SMALL, "--nodes", str(NODES), "--on", substrate, *network, "--mode", mode, "--steps", str(steps)]


# --- what a case does ------------------------------------------------------------------------------------------------


def fatal_case(
    mode: str, substrate: str, fault: str, rank: int, limit: float, steps: int = ENDLESS, flags: Sequence[str] = ()
) -> Outcome:
    """The run must end within `limit` seconds of the fault, name the rank, leave nothing and be in no table."""
    folder = make_scratch()
    try:
        run = run_testbed(*run_flags(mode, steps, substrate), "--fault", fault, *flags, out=folder / "r")
        injected = run.event("injected")
        seconds = round(run.ended - injected["begun"], 2) if injected else None
        left, named, started, in_table = run.left(), run.names(rank), run.started(), run.in_table()
        in_time = seconds is not None and seconds <= limit
        ok = (
            in_time
            and not left
            and started
            and not in_table
            and run.status == "failed"
            and run.code == RankFailed.exit_code
        )
        outcome: Outcome = {"ok": ok, "seconds": seconds, "named": named, "left": len(left), "code": run.code}
        outcome |= {"started": started, "tabled": in_table}
        if steps != ENDLESS:
            outcome |= {"step": injected and injected["step"], "doing": run.last_record(rank)}
            outcome |= {"finished": run.code == 0 and outcome["doing"] == "end"}
        return outcome if ok and named else outcome | {"said": run.output[-500:], "what": left}
    finally:
        remove(folder)


def identical_case(base: list[str], flags: list[str], references: References, by_hand: bool = False) -> Outcome:
    """The run must finish with the parameters of the undisturbed run, and be in the tables only after that.

    A restart from step 0 ends with the same parameters, so the step of the resume is checked as well.
    """
    folder, reference = make_scratch(), " ".join(base)
    every = next((int(flag.removeprefix(CHECKPOINT)) for flag in flags if flag.startswith(CHECKPOINT)), None)
    try:
        if reference not in references:
            references[reference] = run_testbed(*base, out=folder / "reference").final_hash()
        run = run_testbed(*base, *flags, out=folder / "r")
        event, started, left, too_early = run.event("injected"), run.started(), run.left(), False
        if by_hand:
            too_early = run.in_table()
            run = run_testbed("--resume", str(folder / "r"), out=folder / "r")
            left += run.left()
        identical = run.final_hash() is not None and run.final_hash() == references[reference]
        whole = run.code == 0 and run.status == "ok" and run.in_table()
        resumed, due = run.resumed(), certain_checkpoint(every, event["step"]) if event and every else 0
        ok = identical and event is not None and started and whole and not too_early and not left and resumed >= due
        outcome: Outcome = {"ok": ok, "identical": identical, "injected": event is not None, "started": started}
        outcome |= {"left": len(left), "tabled": too_early, "code": run.code, "by_hand": by_hand}
        outcome |= {"resumed": resumed > 0, "after": resumed, "due": due} if every else {}
        return outcome if ok else outcome | {"said": run.output[-800:], "what": left}
    finally:
        remove(folder)


def certain_checkpoint(every: int, done: int) -> int:
    """Return the step of the last checkpoint that all ranks have for certain when one of them has done `done` steps.

    The other ranks may be in that step or, in an overlapping mode, in the step before.
    """
    return max(done - 2, 0) // every * every


def plain_case(mode: str, substrate: str, seed: int) -> Outcome:
    """A short run without a fault must end well and leave nothing."""
    folder = make_scratch()
    try:
        run = run_testbed(*run_flags(mode, PLAIN_STEPS, substrate), "--seed", str(seed), out=folder / "r")
        left, started = run.left(), run.started()
        whole = run.code == 0 and run.status == "ok" and run.final_hash() is not None and run.in_table()
        outcome: Outcome = {"ok": whole and started and not left, "left": len(left), "code": run.code}
        outcome |= {"started": started}
        return outcome if outcome["ok"] else outcome | {"said": run.output[-500:], "what": left}
    finally:
        remove(folder)


def followed_by_plain_run(cases: Cases) -> Cases:
    """Add a plain run to the last case. For the other cases, the next case shows that a run starts after them."""
    *others, (name, last) = cases
    yield from others
    yield name, partial(_with_plain_run, last)


def _with_plain_run(case: Callable[[], Outcome]) -> Outcome:
    """Count what the part's own process left behind for the last case."""
    outcome, own, after = case(), left_by_this_process(), plain_case("ring", "process", 0)
    ok = outcome["ok"] and after["ok"] and not own
    left = outcome.get("left", 0) + len(own) + after["left"]
    whole = {"started": after["started"], **outcome, "ok": ok, "left": left, "afterwards": after}
    return whole | ({"own": own} if own else {})


# --- parts -----------------------------------------------------------------------------------------------------------


def kill(count: int = 20) -> Cases:
    """SIGKILL at seeded moments in every mode, on namespaces and plain processes in turn.

    Every fifth run writes checkpoints, evaluates and ends.
    """
    for mode in KILL_MODES:
        for seed in range(count):
            rng = random.Random(f"kill {mode} {seed}")
            rank, moment = rng.randrange(NODES), rng.randrange(0, 3000)
            substrate = ("netns", "process")[seed % 2]
            fault = f"kill:rank{rank}@{moment}ms" if moment else f"kill:rank{rank}@step0"
            if seed % 5 == 4:
                name = f"{mode} {seed} {substrate} kill:rank{rank} at a checkpoint or an evaluation"
                yield name, partial(_busy_case, mode, substrate, rank, rng)
            else:
                name = f"{mode} {seed} {substrate} {fault}"
                yield name, partial(fatal_case, mode, substrate, fault, rank, KILL_LIMIT_S)


def _busy_case(mode: str, substrate: str, rank: int, rng: random.Random) -> Outcome:
    """Kill a rank at the end of a step after which it writes a checkpoint and evaluates.

    An epoch has as many steps as lie between two checkpoints. The signal may come late: if the run finished before it,
    try again at an earlier step.
    """
    flags = ["--set", f"{CHECKPOINT}{CHECKPOINT_EVERY}", "--set", f"data.subset={CHECKPOINT_EVERY * BATCH}"]
    flags += ["--set", "data.test_subset=2000"]
    step, tries = CHECKPOINT_EVERY * rng.randrange(1, BUSY_STEPS // CHECKPOINT_EVERY), 1
    while True:
        fault = f"kill:rank{rank}@step{step}"
        outcome = fatal_case(mode, substrate, fault, rank, KILL_LIMIT_S, BUSY_STEPS, flags) | {"tries": tries}
        if not outcome["finished"] or step == CHECKPOINT_EVERY:
            return outcome
        step, tries = CHECKPOINT_EVERY * rng.randrange(1, step // CHECKPOINT_EVERY), tries + 1


def silence(count: int = 10) -> Cases:
    """A pause longer than the deadline, and a link that is cut."""
    for kind in ("pause", "cut"):
        for seed in range(count):
            rng = random.Random(f"{kind} {seed}")
            mode = KILL_MODES[seed % len(KILL_MODES)]
            rank, step = rng.randrange(NODES), rng.randrange(1, 60)
            fault = f"{kind}:rank{rank}@step{step}"
            name = f"{mode} {seed} netns {fault}"
            yield name, partial(fatal_case, mode, "netns", fault, rank, SILENCE_LIMIT_S)


def hiccup(count: int = 5) -> Cases:
    """A pause of 3 s, and a tenth of the rate for 5 s: the run ends with the same parameters as the undisturbed one."""
    references: References = {}
    for kind in ("pause", "rate"):
        for seed in range(count):
            rng = random.Random(f"{kind} hiccup {seed}")
            mode = KILL_MODES[seed % len(KILL_MODES)]
            rank, step = rng.randrange(NODES), rng.randrange(5, 40)
            fault = f"pause:rank{rank}@step{step}+3s" if kind == "pause" else f"rate:rank{rank}@step{step}+5s=10mbit"
            base = run_flags(mode, HICCUP_STEPS, "netns")
            yield f"{mode} {seed} {fault}", partial(identical_case, base, ["--fault", fault], references)


def resume(count: int = 10) -> Cases:
    """Killed at a random step and resumed from the last checkpoint, every third by hand: the undisturbed hash."""
    references: References = {}
    for number, (mode, seed) in enumerate((mode, seed) for mode in RESUME_MODES for seed in range(count)):
        rng = random.Random(f"resume {mode} {seed}")
        fault, by_hand = f"kill:rank{rng.randrange(NODES)}@step{rng.randrange(1, RESUME_STEPS - 20)}", number % 3 == 2
        flags = ["--fault", fault, "--set", f"{CHECKPOINT}{rng.choice((7, 10, 25))}"]
        flags += [] if by_hand else ["--retries", "1"]
        name = f"{mode} {seed} {fault} {flags[3]}{' by hand' if by_hand else ''}"
        base = run_flags(mode, RESUME_STEPS, "process")
        yield name, partial(identical_case, base, flags, references, by_hand)


def containers() -> Cases:
    """The same in containers. Without an engine, or with an image of other code, every case is a miss."""
    references: References = {}
    rng = random.Random("containers")
    for mode, rank in (("ring", 0), ("ddp", 1), ("ring/bucket:2MiB/pipeline", 3)):
        kill = f"kill:rank{rank}@{rng.randrange(0, 3000)}ms"
        case = on_engine(partial(fatal_case, mode, "compose", kill, rank, KILL_LIMIT_S))
        yield f"{mode} {kill}", case
    for mode, fault, rank in (("allreduce", "pause:rank2@step20", 2), ("gather", "cut:rank1@step30", 1)):
        case = on_engine(partial(fatal_case, mode, "compose", fault, rank, SILENCE_LIMIT_S))
        yield f"{mode} {fault}", case
    base, again = run_flags("ring", RESUME_STEPS, "compose"), ["--set", f"{CHECKPOINT}10", "--retries", "1"]
    for fault, flags in (("pause:rank3@step15+3s", list[str]()), ("kill:rank2@step55", again)):
        case = on_engine(partial(identical_case, base, ["--fault", fault, *flags], references))
        yield " ".join(["ring", fault, *flags]), case
    yield "ring plain", on_engine(partial(plain_case, "ring", "compose", 0))


def on_engine(case: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Return the case; where no engine answers it is a miss and is not stored."""

    def checked() -> Outcome:
        try:
            engine.check(())
        except Unavailable as error:
            return {"ok": False, UNAVAILABLE: str(error)}
        return case()

    return checked


def short(count: int = 100) -> Cases:
    """Run after run without a fault, each in an empty folder."""
    modes = (*KILL_MODES, *MORE_MODES)
    for number in range(count):
        mode, substrate = modes[number % len(modes)], ("netns", "process")[number // len(modes) % 2]
        yield f"{number} {mode} {substrate}", partial(plain_case, mode, substrate, number)
