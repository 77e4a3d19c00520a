"""run_rank: one rank from start to exit, with or without a controller.

1. join      open the store, start the heartbeat; without a controller, agree on the request and the run folder
2. measure   without a controller only: probe every link (the controller does it before it starts the ranks)
3. train     Trainer.run
4. conclude  without a controller only: rank 0 writes summary.json and prints the table, the others wait for it

Every failure, in any thread, goes through Watchdog.exit_once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from testbed.net.check import Recheck, measure, why_not_trained
from testbed.net.endpoint import interface_of
from testbed.net.probe import probe_node, receipt_of
from testbed.net.shaping import LIST_QDISCS, Shaping, read_buckets
from testbed.rank import watchdog
from testbed.rank.checkpoint import Checkpoints
from testbed.rank.counters import open_counter
from testbed.rank.group import Group, await_all, connect, leave, make_group, single_rank_group
from testbed.rank.layers import recorded_layers
from testbed.rank.recorder import Recorder
from testbed.rank.request import COMPOSE, Request
from testbed.rank.train import Trainer
from testbed.rank.watchdog import Heartbeat, Watchdog, install_oom_handler
from testbed.results.conclude import Status, Summary, conclude, root_cause
from testbed.results.folder import RunFolder, fresh_folder, runs_dir, write_whole
from testbed.results.receipt import Receipt, read_network
from testbed.results.records import Error, Step, read
from testbed.results.table import flatten, format_results
from testbed.spec.disk import os_failure
from testbed.spec.errors import (
    Interrupted,
    NetworkInvalid,
    PeerLost,
    RankFailed,
    SpecError,
    TestbedError,
)
from testbed.spec.run import RunSpec

log = logging.getLogger(__name__)

MASTER_TIMEOUT_S = 900.0  # for rank 0 to listen: it may fetch a data set first
ADDRESS_GONE_S = 20.0  # if rank 0 has no name or address for so long, it has ended: Compose has removed both
CONNECT_RETRY_S = 0.2
PEER_REPORT_TIMEOUT_S = 2.0  # for the other ranks to send their error records to rank 0
SUMMARY_TIMEOUT_S = 120.0  # for rank 0 to write the summary, while the other ranks wait
SUMMARY_TIMEOUT_AFTER_LOSS_S = 5.0  # the same after a rank was lost: rank 0 may be unreachable from here
TC_TIMEOUT_S = 20.0  # tc takes milliseconds


@dataclass
class JoinedRun:
    """A rank's values about the run. Without a controller, rank 0 writes them to summary.json."""

    spec: RunSpec
    folder: RunFolder
    addresses: list[str] = field(default_factory=list)  # of all ranks; without a controller
    notes: list[str] = field(default_factory=list)
    network: str = "not measured"
    invalid: str = ""  # why the run is left out of tables; empty: the run is valid


def run_rank(request: Request) -> int:
    """Take part in one run and return the exit code. A failure ends the process with the error's own exit code."""
    guard = Watchdog(request.rank)
    watchdog.start_signal_watchdog(guard)
    torch.set_num_threads(request.spec.threads)
    try:
        if request.supervised:
            return _run_supervised(request, guard)
        return _run_unsupervised(request, guard)
    except SystemExit as error:  # a user's method called sys.exit; without this, the others would report a lost rank
        guard.exit_once(TestbedError(_describe_exit(error)))
    except Exception as error:
        guard.exit_once(error)


def _describe_exit(error: SystemExit) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"sys.exit({error.code!r}) was called in {frame.filename}, line {frame.lineno}, before the run was over"


def _run_supervised(request: Request, guard: Watchdog) -> int:
    assert request.folder is not None
    spec, folder, rank = request.spec, RunFolder(request.folder), request.rank
    if request.resume:
        folder.set_records_aside(rank)
    guard.recorder = Recorder(folder.records(rank), folder.attempts(rank) if request.resume else {})
    if spec.world > 1:
        guard.heartbeat = _connect(request, guard)
    _train(request, JoinedRun(spec, folder), guard)
    return 0


def _run_unsupervised(request: Request, guard: Watchdog) -> int:
    rank = request.rank
    if request.spec.nodes > 1:
        if rank > 0:
            wait_for_listener(request.master, request.port, same_subnet=request.substrate == COMPOSE)
        guard.heartbeat = _connect(request, guard)
        if 0 < rank < request.spec.world:
            guard.after_failure = partial(_report_failure, guard.heartbeat)
    run = _agree(request, guard)
    if rank >= run.spec.world:
        log.info("mode %s: rank 0 trains alone, rank %d has nothing to do", run.spec.mode, rank)
        return _wait_for_rank_0(guard, code=0, timeout_s=None)
    _measure(request, run, partial(_probe, request, run))
    reason = "" if request.not_shaped else why_not_trained(run.spec, run.invalid)
    if reason:
        run.invalid = reason
        assert guard.heartbeat is not None
        guard.heartbeat.leave()
    else:
        recheck = Recheck(run.folder, partial(_read_shaping, request, run), request.interface)
        _train(request, run, guard, partial(_measure_again, request, run, recheck))
    code = NetworkInvalid.exit_code if run.invalid and not request.not_shaped else 0
    if rank > 0:
        return _wait_for_rank_0(guard, code, SUMMARY_TIMEOUT_S)
    summary = _conclude(request, run, "invalid" if run.invalid else "ok", run.invalid)
    log.info(format_results([summary], _where(run)))
    if summary.status == "failed":  # the records are incomplete
        return RankFailed.exit_code
    return code if request.not_shaped or summary.status == "ok" else NetworkInvalid.exit_code


def _connect(request: Request, guard: Watchdog) -> Heartbeat:
    spec = request.spec
    where = (request.rank, spec.world, request.master, request.port, spec.start_deadline)
    return connect(*where, guard.exit_once, max_ranks=spec.nodes)


def _train(request: Request, run: JoinedRun, guard: Watchdog, recheck: Callable[[Group], None] | None = None) -> None:
    """Make the process group, train, check the network again if there is no controller, leave the group."""
    spec, heartbeat = run.spec, guard.heartbeat
    interface = request.interface or (interface_of(heartbeat.address) if heartbeat else "lo")
    if interface:  # else Gloo chooses an interface by the host name
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # the only setting that Gloo reads for this
    if spec.world > 1:
        assert heartbeat is not None
        group = make_group(heartbeat, spec.start_deadline, spec.topology.racks)
        group.rate = request.rate if request.supervised else read_network(run.folder.receipt, spec).slowest
        group.round_trip_s = spec.fabric.longest_round_trip_s
    else:
        group = single_rank_group()
    assert guard.recorder is not None
    guard.training = True
    keeps = spec.checkpoint or request.resume
    checkpoints = Checkpoints(spec, run.folder.checkpoints, group, request.resume) if keeps else None
    install_oom_handler(spec)
    trainer = Trainer(spec, group, guard.recorder, open_counter(interface), checkpoints)
    with recorded_layers(spec, group.rank, trainer.model, run.folder):
        trainer.run()
    if recheck is not None:
        recheck(group)
    leave(group)


# --- without a controller: join ------------------------------------------------------------------------------------


def wait_for_listener(
    host: str,
    port: int,
    timeout_s: float = MASTER_TIMEOUT_S,
    gone_s: float = ADDRESS_GONE_S,
    same_subnet: bool = False,
) -> None:
    """Return when host:port accepts a connection. Raises RankFailed after `timeout_s`.

    RankFailed is also raised if the name does not resolve for `gone_s`, or if no machine on the same subnet has the
    address for `gone_s`: Compose removes the name and the address of a container that ends.
    """
    known = begun = time.monotonic()
    while (now := time.monotonic()) < begun + timeout_s:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except socket.gaierror:
            reason = f"the name {host!r} does not resolve"
        except OSError as error:
            reason = f"no machine has the address {host}"
            if not (same_subnet and error.errno == errno.EHOSTUNREACH):
                known = now  # the machine exists, but nothing listens yet
        if now > known + gone_s:
            raise RankFailed(f"rank 0 has ended or was never started: {reason}. See its log")
        time.sleep(CONNECT_RETRY_S)
    raise RankFailed(f"rank 0 did not listen at {host}:{port} within {timeout_s:g} s. See its log")


def _agree(request: Request, guard: Watchdog) -> JoinedRun:
    """Check that all ranks have the same request. Rank 0 makes the run folder and publishes its name.

    Raises SpecError if a request differs, PeerLost if a rank is missing.
    """
    heartbeat, rank = guard.heartbeat, request.rank
    if heartbeat is None:
        return _begin(request, guard, _make_folder(request), [], bool(request.synthetic))
    store = heartbeat.store
    store.set(f"request/{rank}", json.dumps({"address": heartbeat.address, "values": _values(request)}))
    if rank == 0:
        return _agree_as_rank_0(request, guard, heartbeat)
    try:
        store.wait(["run"], timedelta(seconds=2 * request.spec.start_deadline))  # longer than rank 0 waits for others
        found: dict[str, Any] = json.loads(store.get("run"))
        store.set(f"ready/{rank}", "1")
    except RuntimeError as error:
        message = f"rank {rank} received no run folder from rank 0 (node0): {error}"
        raise heartbeat.wait_for_verdict(watchdog.LAST_VERDICT_TIMEOUT_S) or PeerLost(message, 0) from None
    if difference := _difference(_values(request), rank, found["values"]):
        raise SpecError(difference)
    path = runs_dir() / request.spec.experiment / Path(found["name"]).name
    if rank < request.spec.world:
        try:
            path.mkdir(parents=True, exist_ok=True)  # nodes may have no shared disk
        except OSError as error:
            raise os_failure(error, path) from None
    return _begin(request, guard, path, found["addresses"], found["synthetic"])


def _agree_as_rank_0(request: Request, guard: Watchdog, heartbeat: Heartbeat) -> JoinedRun:
    """Rank 0's part of `_agree`. Raises SpecError if a request differs, PeerLost if a rank is missing."""
    spec, store = request.spec, heartbeat.store
    keys = [f"request/{rank}" for rank in range(spec.nodes)]  # also of ranks that will not train
    missing: PeerLost | None = None
    try:
        await_all(store, keys, spec.start_deadline)
    except PeerLost as error:  # raised below, when there is a run folder for the summary
        missing = error
    found = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    for rank, other in found.items():
        if difference := _difference(other["values"], rank, _values(request)):
            raise heartbeat.report_lost(SpecError(difference))
    addresses = [found[rank]["address"] for rank in sorted(found) if rank < spec.world]
    run = _begin(request, guard, _make_folder(request), addresses, bool(request.synthetic))
    if missing and spec.world > 1:  # in mode single only rank 0 trains
        raise heartbeat.report_lost(missing)
    message = {"name": run.folder.path.name, "synthetic": bool(request.synthetic), "values": _values(request)}
    store.set("run", json.dumps(message | {"addresses": run.addresses}))
    with contextlib.suppress(RuntimeError):  # a short run must not end before all ranks have read this
        store.wait([f"ready/{rank}" for rank in found if rank > 0] or ["run"], timedelta(seconds=spec.start_deadline))
    return run


def _values(request: Request) -> dict[str, Any]:
    """Return all values that must be equal on all ranks, by their dotted keys. Rank 0 chooses the name of the run."""
    values = flatten(request.spec) | {"SHAPING": request.shaping}
    del values["name"]
    return values


def _difference(values: Mapping[str, Any], rank: int, of_rank_0: Mapping[str, Any]) -> str:
    """Return a sentence about the first key in which a rank's request differs from rank 0's; empty if none does."""
    for key in [*of_rank_0, *values]:
        if values.get(key) != of_rank_0.get(key):
            both = f"{key} {values.get(key)!r} on rank {rank}, {of_rank_0.get(key)!r} on rank 0"
            return f"{both}: all ranks must get the same request. Set the same variables on all nodes."
    return ""


def _make_folder(request: Request) -> Path:
    """Make the run folder and return its path. If the request names a folder, the entrypoint has made it as root."""
    path = request.folder or fresh_folder(runs_dir() / request.spec.experiment, request.spec.name)
    spec, folder = _final_spec(request.spec, path.name, bool(request.synthetic)), RunFolder(path)
    if request.folder:
        write_whole(folder.substrate, request.substrate)
        write_whole(folder.spec, spec.to_json())
    else:
        folder.create(spec, request.substrate)
    return path


def _begin(request: Request, guard: Watchdog, path: Path, addresses: list[str], synthetic: bool) -> JoinedRun:
    """Open the log and the records in the run folder. From now on, a failure of rank 0 writes the summary."""
    spec, folder, rank = _final_spec(request.spec, path.name, synthetic), RunFolder(path), request.rank
    notes = [note for note in (*request.notes, request.synthetic, request.not_shaped) if note]
    run = JoinedRun(spec, folder, addresses, notes, invalid=request.not_shaped if spec.world > 1 else "")
    if rank < spec.world:
        _log_to(folder.log(rank))
        guard.recorder = Recorder(folder.records(rank))
    if rank == 0:
        guard.after_failure = partial(_conclude_failure, request, run, guard.heartbeat)
        ranks = f"{spec.world} rank{'s' if spec.world > 1 else ''}"
        log.info("run %s: %s, %s on %s, %s", _where(run), spec.mode, spec.model, spec.data.name, ranks)
    return run


def _final_spec(spec: RunSpec, name: str, synthetic: bool) -> RunSpec:
    """Return the spec with the name of its folder, and with synthetic images if the data set was not fetched."""
    data = spec.data.model_copy(update={"name": "synthetic"}) if synthetic else spec.data
    return spec.model_copy(update={"name": name, "data": data})


def _log_to(path: Path) -> None:
    """Copy all log lines to rankN.log; a controller redirects the rank's output instead."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("testbed").addHandler(handler)


# --- without a controller: measure ---------------------------------------------------------------------------------


def _measure(request: Request, run: JoinedRun, probe: Callable[[], Receipt]) -> None:
    """Measure all links; rank 0 writes the receipt. If a rate is outside the tolerance, set `invalid` of the run."""
    check = measure(run.spec, probe, partial(_announce, request), retry=not request.not_shaped)
    if check.receipt is not None and request.rank == 0:
        check.receipt.write(run.folder.receipt)
    run.notes += check.notes
    run.network = check.network
    if check.invalid and not request.not_shaped:
        run.invalid = check.network


def _announce(request: Request, sentence: str) -> None:
    if request.rank == 0:
        log.info(sentence)


def _probe(request: Request, run: JoinedRun, sample: int | None = None) -> Receipt:
    """Take part in one probe of all links, or of a sample (see net/probe.py). Raises NetworkInvalid if it fails."""
    rank, fabric = request.rank, run.spec.fabric
    where = (rank, run.addresses, request.probe_port, fabric.rates[rank])
    try:
        measured = probe_node(*where, lambda event: None, sample=sample, added=fabric.distances[rank])
        return receipt_of(measured, fabric)
    except OSError as error:
        raise NetworkInvalid(f"the probe of the network failed: {error}") from None


def _measure_again(request: Request, run: JoinedRun, recheck: Recheck, group: Group) -> None:
    """Set `invalid` of the run, on all ranks alike, if the network is no longer the requested one."""
    if run.invalid or not _is_shaped(request, run):
        return

    def agree(key: str, reason: str) -> str:
        return next(filter(None, group.all_gather_text(key, reason)), "")

    again = partial(_probe, request, run, run.spec.seed) if run.spec.probe else None
    found = recheck.after(again, partial(_announce, request), request.rank == 0, agree)
    run.invalid = found.invalid
    run.notes += found.notes


def _is_shaped(request: Request, run: JoinedRun) -> bool:
    return request.shaping == "both" and run.spec.world > 1 and any(run.spec.rates)


def _read_shaping(request: Request, run: JoinedRun) -> dict[int, Shaping]:
    """Return this node's requested rate and its token buckets; empty if it is not shaped. Raises NetworkInvalid."""
    if not _is_shaped(request, run):
        return {}
    try:
        done = subprocess.run(LIST_QDISCS, capture_output=True, text=True, timeout=TC_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NetworkInvalid(f"the shaping cannot be read: {error}. Use an image with iproute2.") from None
    return {request.rank: Shaping(request.link.rate, read_buckets(done.stdout))}


# --- without a controller: conclude --------------------------------------------------------------------------------


def _report_failure(heartbeat: Heartbeat, record: Error) -> None:
    """Ranks 1..N-1: send the error record to rank 0, and wait until rank 0 has written summary.json."""
    if record.code != Interrupted.exit_code and record.failed_rank != 0:
        heartbeat.send_report(record)
        lost = record.code == PeerLost.exit_code
        heartbeat.wait_until_closed(SUMMARY_TIMEOUT_AFTER_LOSS_S if lost else SUMMARY_TIMEOUT_S)


def _conclude_failure(request: Request, run: JoinedRun, heartbeat: Heartbeat | None, record: Error) -> None:
    """Rank 0: find the root cause and write summary.json."""
    interrupted = record.code == Interrupted.exit_code
    status: Status = "interrupted" if interrupted else "failed"
    reason = record.message if interrupted else _root_cause(record, run, heartbeat)
    with contextlib.suppress(TestbedError):  # a summary that cannot be written must not hide the reason
        _conclude(request, run, status, reason)
    log.error("%s: %s\nall files are in %s", status, reason, _where(run))


def _root_cause(record: Error, run: JoinedRun, heartbeat: Heartbeat | None) -> str:
    """Return the sentence of `root_cause`, from rank 0's error record and the records that other ranks send."""
    errors: list[dict[str, Any] | None] = [{"message": record.message, "failed_rank": record.failed_rank}]
    codes: list[int | None] = [record.code]
    steps = heartbeat.steps | {0: heartbeat.step} if heartbeat else {}
    ended = heartbeat.ended if heartbeat else {}
    reports = (
        heartbeat.collect_reports(PEER_REPORT_TIMEOUT_S) if heartbeat and record.code == PeerLost.exit_code else {}
    )
    for rank in range(1, run.spec.world):
        report = reports.get(rank)
        errors.append(report)
        trained = ended.get(rank) == watchdog.DONE  # the rank only waits for the summary
        codes.append(report["code"] if report else 0 if trained else None)
    ranks = range(run.spec.world)
    cause = root_cause(
        codes,
        errors,
        ended=ended,
        last_steps=[max(steps.get(rank, 0) - 1, _last_recorded(run.folder, rank)) for rank in ranks],
        nodes=[f"node{rank}" for rank in ranks],
        folder=RunFolder(Path(_where(run))),
    )
    return str(cause)


def _last_recorded(folder: RunFolder, rank: int) -> int:
    """Return the last step in a rank's records; -1 without records, e.g. if the nodes have no shared disk.

    Records are newer than the steps that heartbeats report, so the caller uses the larger of both.
    """
    with contextlib.suppress(OSError, TestbedError):  # damaged records must not hide the root cause
        return max((record.step for record in read(folder.records(rank)) if isinstance(record, Step)), default=-1)
    return -1


def _conclude(request: Request, run: JoinedRun, status: Status, reason: str) -> Summary:
    facts: dict[str, Any] = {"reason": reason, "substrate": request.substrate, "network": run.network}
    return conclude(run.folder, run.spec, status=status, notes=run.notes, **facts)


def _where(run: JoinedRun) -> str:
    """Return the path of the run folder outside the container, where runs/ has another path."""
    return f"runs/{run.folder.path.parent.name}/{run.folder.path.name}"


def _wait_for_rank_0(guard: Watchdog, code: int, timeout_s: float | None) -> int:
    """Wait until rank 0 has ended, and return `code`. Ranks 1..N-1 call this.

    A rank must not end before rank 0: Compose may stop all containers, including rank 0's, when one ends. If a signal
    stops this rank before rank 0 has succeeded, the process exits as interrupted; nothing is left to record.
    """

    def stop(*_: object) -> None:
        over = guard.heartbeat is None or guard.heartbeat.rank_0_has_succeeded()
        os._exit(code if over else Interrupted.exit_code)

    for number in watchdog.SIGNALS:
        signal.signal(number, stop)
    if guard.heartbeat:
        guard.heartbeat.wait_until_closed(timeout_s)
    return code
