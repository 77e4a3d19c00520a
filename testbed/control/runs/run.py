"""One run from start to end: create the nodes, measure the network, start the ranks, supervise them, write the summary.

`execute` runs a spec; `resume_run` continues a run that did not finish. Everything that can be refused is refused
before the run's folder exists. After that, summary.json is written however the run ends.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from testbed.control.machine import ownership
from testbed.control.runs import scripts
from testbed.control.runs.faults import Injector
from testbed.control.runs.locks import Lock, folder_lock, machine_lock
from testbed.control.runs.nodes import Nodes, NodesOfRuns
from testbed.control.runs.progress import Progress
from testbed.control.runs.quotas import Quotas
from testbed.control.runs.select import SubstrateChoice, check_faults, node_plans
from testbed.control.runs.supervisor import Tail, Timing, supervise
from testbed.control.substrates.base import NodePlan, Process, Substrate, rank_argv
from testbed.data.layouts import layouts
from testbed.net.check import Recheck, measure, why_not_trained
from testbed.net.probe import Measurement, longest_probe, receipt_of
from testbed.net.shaping import Shaping
from testbed.results.conclude import Status, Summary, conclude
from testbed.results.folder import RunFolder
from testbed.results.receipt import RATE_VARIABLE, Receipt, read_network
from testbed.results.records import Step, read
from testbed.spec.datasets import data_dir, require_complete
from testbed.spec.disk import os_failure
from testbed.spec.errors import (
    AllocationLost,
    EngineLost,
    Interrupted,
    NetworkInvalid,
    RankFailed,
    TestbedError,
    UsageError,
    one_line,
    refuse,
)
from testbed.spec.fabric import Fabric
from testbed.spec.own_files import METHODS_VARIABLE
from testbed.spec.run import RunSpec

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NodeObserver(Protocol):
    """Looks at the nodes from outside, right before the ranks start and when they have ended or failed."""

    def begin(self, substrate: Substrate) -> None: ...
    def end(self, substrate: Substrate, processes: Sequence[Process]) -> None: ...


@dataclass
class RunNotes:
    """What the controller adds to summary.json."""

    substrate: str
    notes: list[str] = field(default_factory=list)
    network: str = "not measured"
    invalid: str = ""  # why the run is left out of tables; empty if it is not


@dataclass
class RunContext:
    """The parts of a run while its nodes exist."""

    spec: RunSpec
    nodes: Nodes
    folder: RunFolder
    progress: Progress
    injector: Injector
    retries: int
    timing: Timing
    notes: Sequence[str] = ()  # on what was done before the nodes were made
    node_observer: NodeObserver | None = None

    @property
    def substrate(self) -> Substrate:
        return self.nodes.substrate


def execute(
    spec: RunSpec,
    choice: SubstrateChoice,
    folder: RunFolder,
    progress: Progress,
    *,
    resume: bool = False,
    retries: int | None = None,
    timing: Timing = Timing(),  # noqa: B008  (frozen)
    lock: Lock = machine_lock,
    node_observer: NodeObserver | None = None,
    nodes: NodesOfRuns | None = None,
) -> Summary:
    """Run the spec to its end and return its summary. Raises a TestbedError if it fails or is interrupted.

    `resume`: continue the run in `folder`; its faults are not injected again. `retries`: instead of the spec's.
    `node_observer` sees the nodes of every attempt. `nodes`, of `shared_nodes`: may be up already, and stay up.
    """
    own = nodes or NodesOfRuns()
    check_inputs(spec)
    if spec.script is not None:
        scripts.check(spec.script, choice.type.runs_here)
    choice.type.check_size(spec)
    if not resume:
        check_faults(spec, choice)
    applied = choice.drop_unsupported(spec)
    with (
        _interrupt_first(),
        _restored_signals(),
        lock(choice, progress.stage),
        folder_lock(folder.path),
        nullcontext() if nodes else choice.type.reserve(progress.stage),
        _orphans_ended(choice, progress) as notes,
        scripts.copies_removed(),
        nullcontext() if nodes else own,
        own.of(choice, spec, folder.path) as up,
    ):
        substrate = up.substrate
        injector = Injector(() if resume else spec.fault_schedule(), substrate, folder.faults)
        substrate.port(spec.port)  # a port that is not free is refused before the folder exists
        if resume:
            _check_unfinished(choice, folder)  # again: the process that held the lock may have finished the run
            folder.reopen()
        else:
            folder.create(applied, choice.name)
        substrate.prepare_folder(folder.path)
        retries = spec.retries if retries is None else retries
        context = RunContext(applied, up, folder, progress, injector, retries, timing, notes, node_observer)
        summary = measure_and_train(context, resume)
        if summary.status != "ok":
            own.discard()
        return summary


def resume_run(
    spec: RunSpec,
    choice: SubstrateChoice,
    folder: RunFolder,
    progress: Progress,
    retries: int,
    lock: Lock = machine_lock,
) -> Summary:
    """Continue a run that did not finish from the last checkpoint that all ranks have. `spec` is the folder's own."""
    folder.check_no_links()
    if not choice.type.keeps_checkpoints:
        rule = f"on {choice.name} checkpoints are stored on the nodes and removed when a run ends"
        way_out = "Start a new run, with --retries N for restarts within the run."
        raise refuse("--resume", str(folder.path), rule, way_out)
    _check_unfinished(choice, folder)
    if folder.copies():
        rule = "its job ran with copies on the idle nodes, which cannot be continued with it"
        raise refuse("--resume", str(folder.path), rule, "Start a new run.")
    return execute(spec, choice, folder, progress, resume=True, retries=retries, lock=lock)


def recorded_substrate(folder: RunFolder) -> str:
    """The substrate that the run began on: of substrate.txt, else of summary.json. "" if neither names one."""
    before = _read_summary(folder)
    return folder.read_substrate() or (before.substrate if before else "")


def _check_unfinished(choice: SubstrateChoice, folder: RunFolder) -> None:
    before = _read_summary(folder)
    if before and before.status == "ok":
        way_out = "Start a new run with another --out."
        raise UsageError(f"run {folder.path}: is finished, so there is nothing to resume. {way_out}")
    began = recorded_substrate(folder)
    if began and began != choice.name:
        rule = f"began on {began}; a run can only be resumed on the substrate it began on, not on {choice.name}"
        raise refuse("--resume", str(folder.path), rule, f"Use --on {began}.")


def _read_summary(folder: RunFolder) -> Summary | None:
    """Return the summary; None if there is none, or it cannot be read."""
    with suppress(OSError, UsageError):
        return Summary.read(folder)
    return None


def check_inputs(spec: RunSpec) -> None:
    """Raise UsageError for missing data. A script of the user's and emulated compute need no data set."""
    if spec.script is None and not spec.emulated:
        require_complete(spec.data.name, data_dir())
    elif spec.script is not None:
        with suppress(OSError, TestbedError):  # a launcher makes the layouts otherwise
            layouts(data_dir())


@contextmanager
def _orphans_ended(choice: SubstrateChoice, progress: Progress) -> Iterator[list[str]]:
    """Kill ranks of dead controllers if they use the cores of this run; yield notes, which are shown too."""
    notes = ownership.end_orphans() if choice.type.is_local() else []
    for note in notes:
        progress.stage(note)
    yield notes


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore the signal handlers at the end, because an interrupted run ignores signals while it cleans up.

    Only the main thread may set handlers; in another thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _interrupt_first() -> Iterator[None]:
    """Raise Interrupted if the clean-up after Ctrl-C fails, with the clean-up's error in the message.

    Otherwise that error would replace it, and a sweep would take it for a failed run and start the next one.
    """
    outer = sys.exception()  # the caller may already handle an exception, which is not of this run
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        context = error.__context__
        while context not in (None, outer) and not isinstance(context, KeyboardInterrupt | Interrupted):
            context = context.__context__
        if context in (None, outer):
            raise
        failure = f"The clean-up failed ({one_line(str(error))}); `testbed clean` removes what is left"
        interrupted = Interrupted(f"{str(context) or 'interrupted'}. {failure}")
        interrupted.folder = getattr(context, "folder", None)
        raise interrupted from None


def measure_and_train(run: RunContext, resume: bool) -> Summary:
    """Measure the network, train, and write the summary, also when the run fails or is interrupted.

    If the network is not as requested, the run ends before training, unless the spec has `keep_going` or the user has
    switched shaping off.
    """
    not_shaped = run.substrate.not_shaped if run.spec.world > 1 else ""
    notes = RunNotes(run.substrate.name, [*run.notes, *run.substrate.notes, *([not_shaped] if not_shaped else [])])
    notes.invalid = not_shaped
    try:
        _measure(run, notes)
        interface = run.substrate.nodes[0].interface
        recheck = Recheck(run.folder, lambda: _read_shaping(run), interface, run.substrate.uplinks)
        notes.invalid = notes.invalid or recheck.before()
        reason = "" if not_shaped else why_not_trained(run.spec, notes.invalid)
        if reason:
            return _conclude(run, notes, "invalid", reason)
        _train(run, notes, resume)
        notes.notes += scripts.notes(run.spec, run.folder)
        if not notes.invalid:
            _measure_again(run, notes, recheck)
    except KeyboardInterrupt:
        _ignore_signals()  # a second Ctrl-C must not interrupt the clean-up
        stopped = _stop(run.substrate)
        kept = f"What was measured is in {run.folder.path}"
        try:
            _conclude(run, notes, "interrupted", "stopped by Ctrl-C")
        except (TestbedError, OSError) as error:
            kept += f", without a summary ({one_line(str(error))})"
        raise _with_folder(Interrupted(f"interrupted; {stopped}. {kept}"), run.folder) from None
    except (TestbedError, OSError) as error:
        _stop(run.substrate)
        cause = error if isinstance(error, TestbedError) else os_failure(error, run.folder.path)
        if isinstance(cause, EngineLost | AllocationLost):
            cause = type(cause)(f"{cause} {_when(run)}. {_kept(run.folder, cause.way_out)}")
        with suppress(TestbedError, OSError):  # an error of writing the summary must not hide the cause
            _conclude(run, notes, "failed", str(cause))
        raise _with_folder(cause, run.folder) from None
    return _conclude(run, notes, "invalid" if notes.invalid else "ok", notes.invalid)


def _when(run: RunContext) -> str:
    """Say how many steps were done."""
    done = 0
    for rank in range(run.spec.world):
        with suppress(TestbedError, OSError):
            done = max([done, *(each.step + 1 for each in read(run.folder.records(rank)) if isinstance(each, Step))])
    return f"at step {done}" if done else "before the first step"


def _kept(folder: RunFolder, way_out: str) -> str:
    again = f"{way_out}, then continue with testbed run --resume {folder.path}"
    return f"What was measured is in {folder.path}. {again}, or start a new run"


def _with_folder(error: TestbedError, folder: RunFolder) -> TestbedError:
    error.folder = folder.path
    return error


def _stop(substrate: Substrate) -> str:
    """Stop all ranks; return a sentence that says whether it worked. An error here must not hide the cause."""
    try:
        substrate.stop()
        return "all ranks are stopped"
    except (TestbedError, OSError) as error:
        return f"not all ranks could be stopped ({one_line(str(error))})"


def _conclude(run: RunContext, notes: RunNotes, status: Status, reason: str) -> Summary:
    return conclude(
        run.folder,
        run.spec,
        status=status,
        reason=reason,
        substrate=notes.substrate,
        one_clock=run.substrate.one_clock,
        notes=[*notes.notes, *(f"fault {fault} was never due" for fault in run.injector.waiting)],
        network=notes.network,
        findings=scripts.findings(run.spec, run.folder),
    )


# Measure the network


def _measure(run: RunContext, notes: RunNotes) -> None:
    """Measure the network and write receipt.json; note it if the network is not as requested."""
    plans = node_plans(run.spec)
    check = measure(
        run.spec,
        lambda: probe(run.substrate, plans, run.progress.link).undilated(run.spec.dilation or 1.0),
        run.progress.stage,
        retry=not notes.invalid,
        earlier=run.nodes.earlier_receipt(),
    )
    if check.receipt is not None:
        check.receipt.write(run.folder.receipt)
        if check.receipt.measured_before is None:
            run.nodes.keep(check.receipt)
    notes.notes += check.notes
    notes.network = check.network
    if check.invalid and not notes.invalid:
        notes.invalid = check.network


def _read_shaping(run: RunContext) -> dict[int, Shaping]:
    """The shaping of all nodes. One node sends nothing through its link, so nothing is compared there."""
    ranks = range(run.spec.world if run.spec.world > 1 else 0)
    return {rank: run.substrate.shaping(rank) for rank in ranks}


def _measure_again(run: RunContext, notes: RunNotes, recheck: Recheck) -> None:
    """Check the network after training. While a fault lasts, and where nothing is shaped, no link is probed."""
    plans, slower = node_plans(run.spec), run.spec.dilation or 1.0

    def again() -> Receipt:
        return probe(run.substrate, plans, run.progress.link, run.spec.seed).undilated(slower)

    wanted = run.spec.probe and recheck.shaped and not run.injector.active
    found = recheck.after(again if wanted else None, run.progress.stage)
    notes.invalid = found.invalid
    notes.notes += found.notes
    if found.notes:  # a link was too slow, or could not be measured
        run.nodes.forget()


ProbeProgress = Callable[[dict[str, Any]], None]
_NODE = re.compile(r"\bnode(\d{1,4})\b", re.ASCII)
PROBE_POLL_S = 0.05  # between reads of the logs
PROBE_GRACE_S = 3.0  # for the other nodes to report after one has failed
PROBE_WAY_OUT = "Try again. If it fails again, `testbed doctor` may show the cause; --set probe=false skips the probe"


def probe(
    substrate: Substrate, plans: Sequence[NodePlan], progress: ProbeProgress, sample: int | None = None
) -> Receipt:
    """Measure links and fan-ins, or with `sample` a few of them (net/probe.py), with one probe process per node.

    Raises NetworkInvalid.
    """
    uplink = plans[0].uplink
    fabric = Fabric.of(
        (plan.link.rate if substrate.shaped else None for plan in plans),
        (plan.rack for plan in plans),
        uplink.rate if uplink and substrate.shaped else None,
        (plan.link.distance for plan in plans) if substrate.shaped else (),
        (uplink.delay if uplink and substrate.shaped else None) or 0.0,
    )
    with tempfile.TemporaryDirectory(prefix="testbed-probe-") as folder:
        logs = [Path(folder) / f"{node.name}.log" for node in substrate.nodes]
        started = _start_probes(substrate, fabric, logs, [] if sample is None else ["--sample", str(sample)])
        try:
            _follow_probes(started, logs, progress, longest_probe(fabric, sample))
            return receipt_of(_measurement(logs[0]), fabric)
        finally:
            _end_probes(started)


def _start_probes(substrate: Substrate, fabric: Fabric, logs: Sequence[Path], more: Sequence[str]) -> list[Process]:
    addresses = [node.address for node in substrate.nodes]
    common = ["-P", "-m", "testbed.net.probe", "--addresses", ",".join(addresses), "--port", str(substrate.port())]
    started = []
    if fabric.shared_uplinks:
        more = [*more, "--uplink", str(fabric.uplink)]
    for node, (rate, log) in enumerate(zip(fabric.rates, logs, strict=True)):
        argv = [substrate.python, *common, *more, "--rank", str(node), "--rate", str(rate or "none")]
        argv += ["--rack", str(fabric.racks[node])] if fabric.shared_uplinks or fabric.uplink_delay else []
        added = asdict(fabric.distances[node]) if fabric.distances else {}
        for name, value in (added | {"uplink-delay": fabric.uplink_delay}).items():
            argv += [f"--{name}", f"{value:.9g}"] if value else []
        started.append(substrate.start(node, argv, {}, log, quota=False))
    return started


def _follow_probes(started: Sequence[Process], logs: Sequence[Path], progress: ProbeProgress, timeout_s: float) -> None:
    """Report every measured flow until all probes have ended. After a failure, wait only PROBE_GRACE_S longer."""
    tails = [Tail(log) for log in logs]
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in started]
        for event in (event for tail in tails for event in tail.read()):
            if event.get("event") == "flow":
                progress(event)
        if None not in codes and not any(codes):
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + PROBE_GRACE_S)
        if None not in codes or time.monotonic() > deadline:
            raise NetworkInvalid(_probe_error(codes, logs))
        time.sleep(PROBE_POLL_S)


def _probe_error(codes: Sequence[int | None], logs: Sequence[Path]) -> str:
    """Return a message with the error of every node, each once, and node names of the inventory instead of `node0`."""
    names = [log.stem for log in logs]
    errors = dict.fromkeys(_last_error(log, names) for code, log in zip(codes, logs, strict=True) if code)
    running = [name for code, name in zip(codes, names, strict=True) if code is None]
    parts = [*errors, *([f"did not end on {', '.join(running)}"] if running else [])]
    return f"the probe of the network failed: {'; '.join(parts)}. {PROBE_WAY_OUT}"


def _last_error(log: Path, names: Sequence[str]) -> str:
    sentences = [str(event["sentence"]) for event in Tail(log).read() if event.get("event") == "error"]
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    if sentences:
        return _NODE.sub(lambda found: dict(enumerate(names)).get(int(found[1]), found[0]), sentences[-1])
    return f"{log.stem}: {lines[-1] if lines else 'ended without output'}"


def _measurement(log: Path) -> Measurement:
    result = next((event for event in Tail(log).read() if event.get("event") == "result"), None)
    if result is None:
        raise NetworkInvalid(f"the probe of the network ended without a result on {log.stem}. {PROBE_WAY_OUT}")
    return Measurement.of(result)


def _end_probes(started: Sequence[Process]) -> None:
    for process in started:
        if process.poll() is None:
            process.signal(signal.SIGKILL)  # a probe has nothing to clean up
    for process in started:
        with contextlib.suppress(TimeoutError):
            process.wait(PROBE_GRACE_S)


# Train


def _train(run: RunContext, notes: RunNotes, resume: bool) -> None:
    """Start the ranks; after a failure start them again from the last checkpoint, at most `retries` times."""
    for retry in range(1, run.retries + 2):
        try:
            return _attempt(run, resume)
        except RankFailed as error:
            if retry > run.retries:
                raise
            run.substrate.stop()
            run.injector.revert_all()
            notes.notes.append(f"an attempt failed: {error}")
            run.progress.stage(f"{error}; all ranks start again (retry {retry} of {run.retries})")
            resume = True
    return None


def _attempt(run: RunContext, resume: bool) -> None:
    spec, substrate, folder = run.spec, run.substrate, run.folder
    run.progress.begin(spec)
    environment = {  # torchrun's variables, and where data and the user's own method are
        "WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": substrate.nodes[0].address,
        "MASTER_PORT": str(substrate.port(spec.port)),
        "OMP_NUM_THREADS": str(spec.threads),
        "TESTBED_DATA": str(data_dir().resolve()),
        METHODS_VARIABLE: str(folder.methods.resolve()),
    }
    if spec.script is not None:
        environment |= scripts.handed(spec.script)
    if rate := read_network(folder.receipt, spec).slowest:
        environment[RATE_VARIABLE] = str(rate)
    argv = rank_argv(substrate.python, spec.script is not None, str(folder.path.resolve()))
    if resume:
        argv.append("--resume")
    tails = [Tail(folder.records(rank), from_end=resume) for rank in range(spec.world)]  # before the ranks write
    processes: list[Process] = []
    quotas = Quotas(spec, substrate, run.injector)
    environment |= quotas.environment()
    if run.node_observer:
        run.node_observer.begin(substrate)
    for rank, node in enumerate(substrate.nodes):
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": node.interface, "TESTBED_ADDRESS": node.address}
        processes.append(substrate.start(rank, argv, environment | own, folder.log(rank)))
    run.injector.attach(processes)
    names = [node.name for node in substrate.nodes]
    script = scripts.rules(spec, substrate) if spec.script else None
    observer = scripts.Allowance(spec.script.limits if spec.script else None, folder.path, quotas)
    try:
        supervise(processes, folder, run.progress, observer, tails, names, run.timing, script)
    finally:
        if run.node_observer:
            run.node_observer.end(substrate, processes)
