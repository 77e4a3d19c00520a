"""Runs that go wrong on purpose: killed, silent, disturbed for a moment, resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from testbed.control.substrates import engine
from testbed.spec.errors import Unavailable
from tests.soak.book import UNAVAILABLE, Outcome
from tests.soak.runs import BATCH, DEADLINE, SMALL, drop, own, scratch, testbed

KILL_MODES = ("gather", "allreduce", "ring", "ddp", "ring/bucket:2MiB/pipeline")
RESUME_MODES = ("ring", "ddp", "ring/bucket:2MiB/pipeline")
FOREVER, SHORT, SHORTER = 1_000_000, 200, 100  # steps
ENDING, EVERY = 30, 5  # steps of a run that ends; between its checkpoints
CHECKPOINT = "checkpoint="  # the setting, before its number of steps
NODES = 4
Cases = Iterator[tuple[str, Callable[[], Outcome]]]


def followed(cases: Cases) -> Cases:
    """That the next run starts is what the next case shows; after the last one there is a plain run."""
    *others, (name, last) = cases
    yield from others
    yield name, lambda: _with_a_plain_run(last)


def _with_a_plain_run(case: Callable[[], Outcome]) -> Outcome:
    """Whatever the part's own process left counts as the last case's."""
    outcome, mine, after = case(), own(), _plain("ring", "process", 0)
    ok = outcome["ok"] and after["ok"] and not mine
    left = outcome.get("left", 0) + len(mine) + after["left"]
    whole = {"started": after["started"], **outcome, "ok": ok, "left": left, "afterwards": after}
    return whole | ({"own": mine} if mine else {})


def kill(count: int = 20) -> Cases:
    """SIGKILL at seeded moments, in every mode, on namespaces and plain processes in turn; every fifth in a run that
    writes checkpoints, evaluates and ends."""
    for mode in KILL_MODES:
        for seed in range(count):
            rng = random.Random(f"kill {mode} {seed}")
            rank, moment = rng.randrange(NODES), rng.randrange(0, 3000)
            place = ("netns", "process")[seed % 2]
            fault = f"kill:rank{rank}@{moment}ms" if moment else f"kill:rank{rank}@step0"
            if seed % 5 == 4:
                name = f"{mode} {seed} {place} kill:rank{rank} at a checkpoint or an evaluation"
                yield name, lambda m=mode, p=place, r=rank, g=rng: _busy(m, p, r, g)
            else:
                name = f"{mode} {seed} {place} {fault}"
                yield name, lambda m=mode, p=place, f=fault, r=rank: _fatal(m, p, f, r, 10.0)


def _busy(mode: str, place: str, rank: int, rng: random.Random) -> Outcome:
    """A finite run whose epochs have as many steps as lie between checkpoints. The blow comes when such a step is done:
    into the write, the evaluation or the step behind. Where the run was quicker, once more at an earlier step."""
    flags = ["--set", f"{CHECKPOINT}{EVERY}", "--set", f"data.subset={EVERY * BATCH}", "--set", "data.test_subset=2000"]
    step, tries = EVERY * rng.randrange(1, ENDING // EVERY), 1
    while True:
        outcome = _fatal(mode, place, f"kill:rank{rank}@step{step}", rank, 10.0, ENDING, flags) | {"tries": tries}
        if not outcome["finished"] or step == EVERY:
            return outcome
        step, tries = EVERY * rng.randrange(1, step // EVERY), tries + 1


def silence(count: int = 10) -> Cases:
    """A pause beyond the deadline, and a cable that is pulled."""
    for kind in ("pause", "cut"):
        for seed in range(count):
            rng = random.Random(f"{kind} {seed}")
            mode = KILL_MODES[seed % len(KILL_MODES)]
            rank, step = rng.randrange(NODES), rng.randrange(1, 60)
            fault = f"{kind}:rank{rank}@step{step}"
            yield f"{mode} {seed} netns {fault}", lambda m=mode, f=fault, r=rank: _fatal(m, "netns", f, r, DEADLINE + 5)


def _fatal(
    mode: str, place: str, fault: str, rank: int, limit: float, steps: int = FOREVER, flags: Sequence[str] = ()
) -> Outcome:
    """The run must end by itself in time, name the rank, leave nothing and count nowhere."""
    folder = scratch()
    try:
        run = testbed(*_short(mode, steps, place), "--fault", fault, *flags, out=folder / "r")
        injected = run.event("injected")
        seconds = round(run.ended - injected["begun"], 2) if injected else None
        left = run.left()
        named = run.names(rank)
        started, tabled = run.started(), run.tabled()
        in_time = seconds is not None and seconds <= limit
        ok = in_time and not left and started and not tabled and run.status == "failed" and run.code == 3
        outcome: Outcome = {"ok": ok, "seconds": seconds, "named": named, "left": len(left), "code": run.code}
        outcome |= {"started": started, "tabled": tabled}
        if steps != FOREVER:
            outcome |= {"step": injected and injected["step"], "doing": run.doing(rank)}
            outcome |= {"finished": run.code == 0 and outcome["doing"] == "end"}
        return outcome if ok and named else outcome | {"said": run.said[-500:], "what": left}
    finally:
        drop(folder)


def hiccup(count: int = 5) -> Cases:
    """A pause of 3 s, and a tenth of the rate for 5 s: the run finishes with the very parameters of the undisturbed."""
    references: dict[str, str | None] = {}
    for kind in ("pause", "rate"):
        for seed in range(count):
            rng = random.Random(f"{kind} hiccup {seed}")
            mode = KILL_MODES[seed % len(KILL_MODES)]
            rank, step = rng.randrange(NODES), rng.randrange(5, 40)
            fault = f"pause:rank{rank}@step{step}+3s" if kind == "pause" else f"rate:rank{rank}@step{step}+5s=10mbit"
            yield (
                f"{mode} {seed} {fault}",
                lambda m=mode, f=fault: _same(_short(m, SHORT, "netns"), ["--fault", f], references),
            )


def resume(count: int = 10) -> Cases:
    """Killed at a random step, restarted from the last checkpoint, every third by hand: the undisturbed hash.

    A restart from the beginning would give it, too: that the checkpoint was used is looked at."""
    references: dict[str, str | None] = {}
    for number, (mode, seed) in enumerate((mode, seed) for mode in RESUME_MODES for seed in range(count)):
        rng = random.Random(f"resume {mode} {seed}")
        fault, hand = f"kill:rank{rng.randrange(NODES)}@step{rng.randrange(1, SHORTER - 20)}", number % 3 == 2
        flags = ["--fault", fault, "--set", f"{CHECKPOINT}{rng.choice((7, 10, 25))}"]
        flags += [] if hand else ["--retries", "1"]
        name = f"{mode} {seed} {fault} {flags[3]}{' by hand' if hand else ''}"
        yield name, lambda m=mode, f=flags, h=hand: _same(_short(m, SHORTER, "process"), f, references, h)


def _same(base: list[str], flags: list[str], references: dict[str, str | None], by_hand: bool = False) -> Outcome:
    """The run must finish with the parameters of the undisturbed one, and be in the tables only when it has."""
    folder, which = scratch(), " ".join(base)
    every = next((int(flag.removeprefix(CHECKPOINT)) for flag in flags if flag.startswith(CHECKPOINT)), None)
    try:
        if which not in references:
            references[which] = testbed(*base, out=folder / "reference").final_hash()
        run = testbed(*base, *flags, out=folder / "r")
        event, started, left, tabled = run.event("injected"), run.started(), run.left(), False
        if by_hand:
            tabled = run.tabled()
            run = testbed("--resume", str(folder / "r"), out=folder / "r")
            left += run.left()
        identical = run.final_hash() is not None and run.final_hash() == references[which]
        whole = run.code == 0 and run.status == "ok" and run.tabled()
        resumed, due = run.resumed(), kept(every, event["step"]) if event and every else 0
        ok = identical and event is not None and started and whole and not tabled and not left and resumed >= due
        outcome: Outcome = {"ok": ok, "identical": identical, "injected": event is not None, "started": started}
        outcome |= {"left": len(left), "tabled": tabled, "code": run.code, "by_hand": by_hand}
        outcome |= {"resumed": resumed > 0, "after": resumed, "due": due} if every else {}
        return outcome if ok else outcome | {"said": run.said[-800:], "what": left}
    finally:
        drop(folder)


def kept(every: int, done: int) -> int:
    """The step of the last checkpoint that all ranks have for certain when one of them has done so many steps.

    The others may be in the step that it did last and, where that is overlapped, in the one before.
    """
    return max(done - 2, 0) // every * every


def containers() -> Cases:
    """The same in containers: where no engine answers, or its image is of other code, every case is missed."""
    references: dict[str, str | None] = {}
    rng = random.Random("containers")
    for mode, rank in (("ring", 0), ("ddp", 1), ("ring/bucket:2MiB/pipeline", 3)):
        kill = f"kill:rank{rank}@{rng.randrange(0, 3000)}ms"
        yield f"{mode} {kill}", _contained(lambda m=mode, f=kill, r=rank: _fatal(m, "compose", f, r, 10.0))
    for mode, fault, rank in (("allreduce", "pause:rank2@step20", 2), ("gather", "cut:rank1@step30", 1)):
        yield f"{mode} {fault}", _contained(lambda m=mode, f=fault, r=rank: _fatal(m, "compose", f, r, DEADLINE + 5))
    base, again = _short("ring", SHORTER, "compose"), ["--set", f"{CHECKPOINT}10", "--retries", "1"]
    for fault, flags in (("pause:rank3@step15+3s", []), ("kill:rank2@step55", again)):
        case = _contained(lambda f=fault, g=flags: _same(base, ["--fault", f, *g], references))
        yield " ".join(["ring", fault, *flags]), case
    yield "ring plain", _contained(lambda: _plain("ring", "compose", 0))


def _contained(case: Callable[[], Outcome]) -> Callable[[], Outcome]:
    def checked() -> Outcome:
        try:
            engine.check(())
        except Unavailable as error:
            return {"ok": False, UNAVAILABLE: str(error)}
        return case()

    return checked


def _short(mode: str, steps: int, place: str) -> list[str]:
    return [*SMALL, *_network(place), "--mode", mode, "--steps", str(steps)]


def _network(place: str) -> list[str]:
    return ["--nodes", str(NODES), "--on", place, *(["--rate", "100mbit"] if place != "process" else [])]


def short(count: int = 100) -> Cases:
    """Nothing goes wrong: run after run, each from an empty folder, with nothing left."""
    modes = (*KILL_MODES, "tree", "halving", "server", "ring/every:4", "allreduce/bucket:100KB/overlap")
    for number in range(count):
        mode, place = modes[number % len(modes)], ("netns", "process")[number // len(modes) % 2]
        yield f"{number} {mode} {place}", lambda m=mode, p=place, n=number: _plain(m, p, n)


def _plain(mode: str, place: str, seed: int) -> Outcome:
    folder = scratch()
    try:
        run = testbed(*_short(mode, 20, place), "--seed", str(seed), out=folder / "r")
        left, started = run.left(), run.started()
        whole = run.code == 0 and run.status == "ok" and run.final_hash() is not None and run.tabled()
        outcome: Outcome = {"ok": whole and started and not left, "left": len(left), "code": run.code}
        outcome |= {"started": started}
        return outcome if outcome["ok"] else outcome | {"said": run.said[-500:], "what": left}
    finally:
        drop(folder)
