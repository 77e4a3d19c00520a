"""The life of one run: place it, shape it, measure the network, start the ranks, follow them, sum up."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.control.cli.progress import Progress
from testbed.control.runs.faults import Injector
from testbed.control.runs.locks import alone, held
from testbed.control.runs.select import Place, check_faults, plans
from testbed.control.runs.supervisor import Tail, follow
from testbed.control.substrates.base import NodePlan, Process, Substrate
from testbed.net.probe import Measurement, longest_probe, measure, receipt_of
from testbed.results.conclude import Status, Summary, conclude
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.datasets import data_dir, dataset_info, is_complete
from testbed.spec.errors import (
    Interrupted,
    NetworkInvalid,
    RankFailed,
    TestbedError,
    Unavailable,
    UsageError,
    os_failure,
    refuse,
)
from testbed.spec.mode import ALGORITHMS, methods_dir
from testbed.spec.run import RunSpec

# Measure a substrate's network: one probe process per node, their progress followed, a receipt in the end.

ProbeProgress = Callable[[dict[str, Any]], None]
_NODE = re.compile(r"\bnode(\d{1,4})\b", re.ASCII)
POLL = 0.05  # seconds between looks at the logs
GRACE = 3.0  # seconds for the others to say why, once one has failed
WAY_OUT = "Try again; if it stays so, `testbed doctor` may know why, and --set probe=false goes without"


def probe(substrate: Substrate, plans: Sequence[NodePlan], progress: ProbeProgress) -> Receipt:
    """Measure every directed link and the fan-in; NetworkInvalid, with the nodes' own words, when it cannot be done."""
    rates = [plan.link.rate if substrate.shaped else None for plan in plans]
    with tempfile.TemporaryDirectory(prefix="testbed-probe-") as folder:
        logs = [Path(folder) / f"{node.name}.log" for node in substrate.nodes]
        started = _start(substrate, rates, logs)
        try:
            _follow(started, logs, progress, seconds=longest_probe(rates))
            return receipt_of(_measurement(logs[0]), rates)
        finally:
            _end(started)


def _start(substrate: Substrate, rates: Sequence[int | None], logs: Sequence[Path]) -> list[Process]:
    addresses = [node.address for node in substrate.nodes]
    common = ["-m", "testbed.net.probe", "--addresses", ",".join(addresses), "--port", str(substrate.port())]
    started = []
    for node, (rate, log) in enumerate(zip(rates, logs, strict=True)):
        argv = [substrate.python, *common, "--rank", str(node), "--rate", str(rate or "none")]
        started.append(substrate.start(node, argv, {}, log, quota=False))
    return started


def _follow(started: Sequence[Process], logs: Sequence[Path], progress: ProbeProgress, seconds: float) -> None:
    """Pass every event on until all have ended; one failure ends the wait soon after."""
    tails = [Tail(log) for log in logs]
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in started]
        for event in (event for tail in tails for event in tail.read()):
            if event.get("event") == "flow":
                progress(event)
        if None not in codes and not any(codes):
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
        if None not in codes or time.monotonic() > deadline:
            raise NetworkInvalid(_complaint(codes, logs))
        time.sleep(POLL)


def _complaint(codes: Sequence[int | None], logs: Sequence[Path]) -> str:
    """Every node's own words, each once; a probe knows nodes by number, the user by name."""
    names = [log.stem for log in logs]
    words = dict.fromkeys(_last_words(log, names) for code, log in zip(codes, logs, strict=True) if code)
    silent = [name for code, name in zip(codes, names, strict=True) if code is None]
    parts = [word for word in words if word] + ([f"no end of it on {', '.join(silent)}"] if silent else [])
    return f"the probe of the network failed: {'; '.join(parts)}. {WAY_OUT}"


def _last_words(log: Path, names: Sequence[str]) -> str:
    sentences = [str(event["sentence"]) for event in Tail(log).read() if event.get("event") == "error"]
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    if sentences:
        return _NODE.sub(lambda found: dict(enumerate(names)).get(int(found[1]), found[0]), sentences[-1])
    return f"{log.stem}: {lines[-1] if lines else 'ended without a word'}"


def _measurement(log: Path) -> Measurement:
    result = next((event for event in Tail(log).read() if event.get("event") == "result"), None)
    if result is None:
        raise NetworkInvalid(f"the probe of the network ended without a result on {log.stem}. {WAY_OUT}")
    return Measurement.of(result)


def _end(started: Sequence[Process]) -> None:
    for process in started:
        if process.poll() is None:
            process.signal(signal.SIGKILL)  # holds nothing worth writing down
    for process in started:
        with contextlib.suppress(TimeoutError):
            process.wait(GRACE)


@dataclass
class Facts:
    """What only the controller knows of a run; it becomes part of summary.json."""

    substrate: str
    notes: list[str] = field(default_factory=list)
    network: str = "not measured"
    invalid: str = ""  # why the run must stay out of tables, when it must


def execute(
    spec: RunSpec, place: Place, folder: RunFolder, progress: Progress, resume: bool = False, retries: int | None = None
) -> Summary:
    """Run to the end. Bad input raises before the folder exists; from then on summary.json says what happened.

    `resume`: the rest of an earlier run, whose faults are over. `retries`: instead of the spec's.
    """
    check_before(spec)
    if not resume:
        check_faults(spec, place)
    with alone(place), held(folder.path), place.make(spec, folder.path) as substrate:
        injector = Injector(() if resume else spec.schedule(), substrate, folder.faults)
        substrate.port(spec.port)  # refused here, it costs nothing
        if resume:
            _check_unfinished(place, folder)  # again: whoever was waited for may have finished it
            folder.reopen()
        else:
            folder.create(place.fit(spec), place.name)
        substrate.prepare_folder(folder.path)
        retries = spec.retries if retries is None else retries
        return _live(Life(place.fit(spec), substrate, folder, progress, injector, retries), resume)


def resume(place: Place, folder: RunFolder, progress: Progress, retries: int) -> Summary:
    """Go on with a run that did not finish, from the last checkpoint that all its ranks have."""
    folder.check_no_links()
    if not place.keeps_checkpoints:
        rule = f"on {place.name}, checkpoints lie there and are removed when a run ends"
        raise refuse("--resume", str(folder.path), rule, "Run it anew, with --retries N for restarts within the run.")
    _check_unfinished(place, folder)
    return execute(folder.read_spec(), place, folder, progress, resume=True, retries=retries)


def _check_unfinished(place: Place, folder: RunFolder) -> None:
    """A finished run has no rest, and the rest of another is run where it began."""
    before = _summary(folder)
    if before and before.status == "ok":
        raise UsageError(f"run {folder.path} is finished, nothing is left to resume. Run it anew with another --out.")
    began = where_it_began(folder)
    if began and began != place.name:
        rule = f"began on {began}, and half a run there and half on {place.name} is no run"
        raise refuse("--resume", str(folder.path), rule, f"Use --on {began}.")


def where_it_began(folder: RunFolder) -> str:
    """The place that the folder names, else its summary: that of a killed controller is missing. "": nobody knows."""
    before = _summary(folder)
    return folder.read_substrate() or (before.substrate if before else "")


def _summary(folder: RunFolder) -> Summary | None:
    """How a run ended; None where it did not, or nobody can tell."""
    with suppress(OSError, UsageError):
        return Summary.read(folder)
    return None


@dataclass
class Life:
    """What one run is made of while it lives."""

    spec: RunSpec
    substrate: Substrate
    folder: RunFolder
    progress: Progress
    injector: Injector
    retries: int


def _live(life: Life, resume: bool) -> Summary:
    facts = Facts(life.substrate.name, list(life.substrate.notes))
    try:
        _measure(life.spec, life.substrate, life.folder, facts, life.progress)
        _train(life, facts, resume)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # one is enough: now things are put away
            signal.signal(number, signal.SIG_IGN)
        stopped = _stop(life.substrate)
        _conclude(life, facts, "interrupted", "stopped by Ctrl-C")
        raise Interrupted(f"interrupted; {stopped}. What was measured is in {life.folder.path}") from None
    except (TestbedError, OSError) as error:
        _stop(life.substrate)
        verdict = error if isinstance(error, TestbedError) else os_failure(error, life.folder.path)
        with suppress(TestbedError):  # a summary that cannot be written must not hide why; without one nothing counts
            _conclude(life, facts, "failed", str(verdict))
        raise verdict from None
    return _conclude(life, facts, "invalid" if facts.invalid else "ok", facts.invalid)


def _stop(substrate: Substrate) -> str:
    """How that went, in words: what could not be stopped must not hide why."""
    try:
        substrate.stop()
        return "all ranks are stopped"
    except TestbedError as error:
        return str(error)


def check_before(spec: RunSpec) -> None:
    """Refuse what cannot work, before anything exists."""
    name, info = spec.data.name, dataset_info(spec.data.name)
    if not is_complete(name, data_dir()):
        way_out = f"Get it with `testbed data get {name}`, or use --data synthetic."
        raise Unavailable(f"data {name!r}: not in {(data_dir() / name).resolve()}. {way_out}")
    _check_method(spec)
    sizes = (("subset", spec.data.subset, info.train), ("test_subset", spec.data.test_subset, info.test))
    for key, asked, there in sizes:
        if asked is not None and asked > there:
            raise refuse(f"data.{key}", asked, f"{name} has {there} such images", "Ask for fewer.")


def _check_method(spec: RunSpec) -> None:
    """A user's own method must at least be Python."""
    if spec.mode.algorithm in ALGORITHMS:
        return
    path = methods_dir() / f"{spec.mode.algorithm.replace('-', '_')}.py"
    try:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"mode {spec.mode}: {path} cannot be used ({error}). Mend it.") from None


def _measure(spec: RunSpec, substrate: Substrate, folder: RunFolder, facts: Facts, progress: Progress) -> None:
    """Write the receipt before training; a network that is off makes the run invalid, not impossible."""
    if spec.world == 1:
        facts.network = "one node, no network"
        return
    if not spec.probe:
        facts.network = "not measured (probe = false)"
        facts.notes.append("probe = false: nobody checked the network")
        return
    progress.stage(f"measuring the network: {spec.world * (spec.world - 1)} links and the fan-in")
    receipt, notes = measure(lambda: probe(substrate, plans(spec), progress.link), progress.stage)
    receipt.write(folder.receipt)
    facts.notes += notes
    facts.network = receipt.sentence()
    if not receipt.valid():
        facts.invalid = facts.network


def _train(life: Life, facts: Facts, resume: bool) -> None:
    """Once, and again from the last checkpoint as often as the spec allows when a rank is lost."""
    for left in range(life.retries, -1, -1):
        try:
            return _attempt(life, resume)
        except RankFailed as error:
            if not left:
                raise
            life.substrate.stop()
            life.injector.mend()
            facts.notes.append(f"an attempt failed: {error}")
            life.progress.stage(f"{error}; all ranks start again, {left} more times at most")
            resume = True
    return None


def _attempt(life: Life, resume: bool) -> None:
    spec, substrate, folder = life.spec, life.substrate, life.folder
    life.progress.begin(spec)
    common = _environment(spec, substrate, substrate.port(spec.port))
    argv = [substrate.python, "-m", "testbed.rank", "--folder", str(folder.path.resolve()), *["--resume"] * resume]
    tails = [Tail(folder.records(rank), anew=resume) for rank in range(spec.world)]  # before anything new is written
    processes: list[Process] = []
    for rank, node in enumerate(substrate.nodes):
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": node.interface}
        processes.append(substrate.start(rank, argv, common | own, folder.log(rank)))
    life.injector.attach(processes)
    names = [node.name for node in substrate.nodes]
    follow(processes, folder, life.progress, life.injector, tails, names)


def _environment(spec: RunSpec, substrate: Substrate, port: int) -> dict[str, str]:
    """torchrun's contract, and where things lie."""
    return {
        "WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": substrate.nodes[0].address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(spec.threads),
        "TESTBED_DATA": str(data_dir().resolve()),
        "TESTBED_METHODS": str(methods_dir().resolve()),
    }


def _conclude(life: Life, facts: Facts, status: Status, reason: str) -> Summary:
    """Write summary.json last: a folder without it never finished."""
    notes = [*facts.notes, *(f"fault {fault} never came due" for fault in life.injector.waiting)]
    told = {"reason": reason, "substrate": facts.substrate, "network": facts.network}
    return conclude(life.folder, life.spec, status=status, notes=notes, **told)
