"""Watchdog: ends this rank when it gets a signal, fails, or loses another rank, even while Gloo blocks.

Three threads can find a reason to end: the main thread (an exception), the signal thread (SIGTERM while the main thread
waits inside Gloo) and the heartbeat thread (another rank is dead, frozen or cut off). All of them call
`Watchdog.exit_once`, the only failure path of a rank.

The fault `oom` is here too: a rank that gets SIGUSR1 allocates memory until its limit ends it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from testbed.net.channel import HELLO_TIMEOUT_S, MAX_UNIDENTIFIED, Channel, listen, new_token, token_matches
from testbed.results.folder import runs_dir
from testbed.results.records import Error
from testbed.spec.disk import is_full, os_failure
from testbed.spec.errors import (
    ChannelClosed,
    DiskFull,
    Interrupted,
    NetworkInvalid,
    PeerLost,
    RankFailed,
    ReplicasDiffer,
    SpecError,
    TestbedError,
    UsageError,
)
from testbed.spec.words import setting

if TYPE_CHECKING:  # importing torch takes a second, and signal handlers are installed before that
    import torch.distributed as dist

    from testbed.rank.recorder import Recorder
from testbed.spec.run import RunSpec

log = logging.getLogger(__name__)

# --- signals -------------------------------------------------------------------------------------------------------
#
# A Python signal handler runs only when the main thread returns to Python code. Inside Gloo that can take as long as an
# all-reduce on a slow network. So the C handler also writes the signal's number to a pipe. A thread reads the pipe,
# gives the main thread some time, and then ends the rank itself. Before training this time is short, because nothing is
# measured yet, and the controller stops ranks that wait for a rank that has ended.

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNAL_GRACE_S = 3.0  # for the main thread to raise, record the failure and exit
START_SIGNAL_GRACE_S = 0.3  # the same before training


def raise_interrupted() -> None:
    """Install handlers of SIGTERM and SIGINT that raise Interrupted in the main thread, and unblock both signals."""
    for number in SIGNALS:
        signal.signal(number, _raise_interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    ignore_signals()  # a second signal must not interrupt the recording of the first
    raise Interrupted(f"stopped by {signal.Signals(signum).name}")


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on. Does nothing in other threads: only the main thread may set handlers."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def start_signal_watchdog(guard: Watchdog) -> None:
    """Start a thread that calls `guard.exit_once` if a signal came and the main thread did not exit in time."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        name = signal.Signals(os.read(reading, 1)[0]).name
        time.sleep(SIGNAL_GRACE_S if guard.training else START_SIGNAL_GRACE_S)
        guard.exit_once(Interrupted(f"stopped by {name} while it waited for other ranks"))

    threading.Thread(target=watch, daemon=True, name="signals").start()


# --- heartbeat -----------------------------------------------------------------------------------------------------
#
# Every rank keeps one TCP connection to rank 0, separate from Gloo, and both ends send a short message several times a
# second. A closed connection is a dead rank; a connection that is silent for longer than the deadline is a frozen rank
# or a cut link. Rank 0 decides which rank failed and sends the verdict to all; if rank 0 is lost, each rank detects it.
# Rank 0 listens at the store's address, on a port that it publishes in the store together with a token. Messages are
# JSON objects, one a line:
#
#   {"hello": 2, "token": ...}                first message of a rank, with its number
#   {"step": 7, "phase": "sync"}              heartbeat; with "wait_failed" if the main thread's wait failed
#   {"verdict": 1, "why": ...}                rank 1 failed: all ranks end
#   {"refused": ...}                          the request is refused: all ranks end
#   {"bye": "done", "rank": 2}                rank 2 ends for this reason; with "refused" if it refuses the request
#   {"report": {"code": 6, "message": ...}}   a failed rank's error record, for rank 0's summary

PERIOD_S = 0.25  # between two heartbeats
QUIET_S = 1.5  # after a wait has failed, a rank that is silent for longer than this counts as failed
VERDICT_TIMEOUT_S = 3.0  # for rank 0 to name the failed rank, after a wait of this rank has failed
KEEPALIVE_S = 60  # without a packet, after which the kernel sends keepalive probes to rank 0's machine
MAX_LINE_BYTES = 4096
MAX_REASON_CHARS = 1000
MAX_REFUSAL_BYTES = 3000  # the reason of a refusal must fit into a line of MAX_LINE_BYTES
BACKLOG = 1024  # a connection that the kernel refuses is retried only after a second
STORE_KEY = "heartbeat"
DONE, STOPPED = "done", "stopped"  # reasons why a rank ends without a failure of its own
CLOSED = "closed"  # replaces the reason of a rank whose connection closed before it sent a reason
WAITING = "sync"  # the phase in which a rank waits for others


@dataclass
class Peer:
    """The other end of one connection."""

    channel: Channel
    last_message: float  # monotonic time when it arrived
    rank: int | None = None  # None until its hello
    step: int = 0
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None if the connection is closed or has sent no message."""
        messages = []
        try:
            self.channel.read_once()
            while (message := self.channel.next_message()) is not None:
                messages.append(message)
        except ChannelClosed:
            return None
        return messages


class Heartbeat:
    """One thread per rank. It calls `end` with the verdict; in a rank process that call does not return."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.TCPStore,
        deadline: float,
        end: Callable[[TestbedError], object],
        max_ranks: int | None = None,
    ) -> None:
        """`size` ranks train. Ranks `size` to `max_ranks` - 1 may connect too; they only wait for the end of rank 0."""
        self.rank, self.size, self.store = rank, size, store
        self.max_ranks = size if max_ranks is None else max_ranks
        self.deadline = deadline
        self.end = end
        self.step, self.phase = 0, "start"  # set by the main thread
        self.address = ""  # of this node, on the way to rank 0
        self.own_method = ""  # the user's method that exchanges gradients; empty: the method is built in
        self.trying = False  # True while the user's method is tested before training: a failure refuses the request
        self.verdict: TestbedError | None = None
        self.steps: dict[int, int] = {}  # rank 0: the last step that each other rank reported
        self.reports: dict[int, dict[str, Any]] = {}  # rank 0: error records of the others
        self.ended: dict[int, str] = {}  # why each rank ended: the reason that it sent, or CLOSED
        self._known = threading.Event()  # set once the verdict was sent to the others
        self._wait_failed_at: float | None = None  # when the main thread's wait failed
        self._leaving = threading.Event()
        self._leave_reason = self._refused = ""
        self._peers: list[Peer] = []
        self._lost_rank_0: dict[int, str] = {}  # rank 0: ranks that report rank 0 as lost, with their reason
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None  # rank 0's
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    # --- called by the main thread ---

    def start(self, deadline: float) -> None:
        """Start the thread: rank 0 listens, the others connect. Raises RuntimeError or OSError after the deadline."""
        if self.rank == 0:
            self._token = new_token()
            self._listener = listen(self.store.host, 0, BACKLOG)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self.address = self._listener.getsockname()[0]
            where = {"port": self._listener.getsockname()[1], "token": self._token}
            self.store.set(STORE_KEY, json.dumps(where))
        else:
            self.store.wait([STORE_KEY], timedelta(seconds=deadline))
            where = json.loads(self.store.get(STORE_KEY))
            connection = socket.create_connection((self.store.host, where["port"]), timeout=deadline)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            self.address = connection.getsockname()[0]
            rank_0 = self._add(connection)
            rank_0.rank = 0
            rank_0.channel.try_send({"hello": self.rank, "token": where["token"]})
        if self.rank < self.size:
            self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """Set the step and the phase that the next heartbeats report."""
        self.step, self.phase = step, phase

    def identify_lost(self) -> TestbedError | None:
        """Return the verdict on which rank was lost, after an error in a wait; None if there is no verdict in time."""
        self._wait_failed_at = time.monotonic()
        return self.wait_for_verdict(VERDICT_TIMEOUT_S)

    def report_lost(self, error: TestbedError) -> TestbedError:
        """Send all ranks the main thread's verdict, and return the verdict that holds: an earlier one is kept."""
        self._decide(error)
        return self.wait_for_verdict(VERDICT_TIMEOUT_S) or error

    def wait_for_verdict(self, timeout_s: float) -> TestbedError | None:
        """Return the verdict after it was sent to the other ranks; None if there is none within `timeout_s`."""
        if self.rank >= self.size:  # this rank has no thread that reads
            for peer in list(self._peers):
                self._receive(peer)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._known.wait(timeout_s)
        return self.verdict

    def leave(self, reason: str = DONE, refused: str = "") -> None:
        """Stop the thread and send the reason to the other ranks. Connections stay open until the process ends.

        `refused` is the sentence with which this rank refuses the request. All ranks then refuse it with this sentence.
        """
        if self._thread.ident is None or threading.current_thread() is self._thread:
            return
        self._leave_reason, self._refused = reason, _fit(refused)
        self._leaving.set()
        self._thread.join(2 * PERIOD_S + 0.5)

    def close(self) -> None:
        """Close all connections. Needed only in tests, because the end of the process does the same."""
        for each in [peer.channel.sock for peer in self._peers] + ([self._listener] if self._listener else []):
            each.close()
        self._selector.close()

    # --- called by the thread that ends the rank, after the heartbeat thread has stopped reading ---

    def send_report(self, record: Error, timeout_s: float = 1.0) -> None:
        """Send this rank's error record to rank 0."""
        report = asdict(record) | {"message": record.message[:MAX_REASON_CHARS]}
        for peer in self._peers:
            with contextlib.suppress(OSError, ChannelClosed):
                peer.channel.sock.settimeout(timeout_s)
                peer.channel.send({"report": report})

    def collect_reports(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Rank 0: return the error records of other ranks. Wait for each rank that is connected and not lost."""
        lost = self.verdict.failed_rank if isinstance(self.verdict, PeerLost) else None
        deadline = time.monotonic() + timeout_s
        open_peers = [peer for peer in self._peers if peer.rank is not None and 0 < peer.rank < self.size]
        while open_peers and time.monotonic() < deadline:
            for peer in list(open_peers):
                messages = peer.read()
                for message in messages or []:
                    self._keep_report(peer, message)
                if messages is None and peer.rank is not None:
                    self.ended.setdefault(peer.rank, CLOSED)
                if messages is None or peer.rank in self.reports:
                    open_peers.remove(peer)
            if all(peer.rank == lost and peer.rank not in self.ended for peer in open_peers):
                break  # a rank that sent no reason is frozen or cut off, and sends no report
            time.sleep(0.02)
        return self.reports

    def wait_until_closed(self, timeout_s: float | None) -> None:
        """Ranks 1..N-1: wait until rank 0 has closed its connection, at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for peer in self._peers:
            while deadline is None or time.monotonic() < deadline:
                left = None if deadline is None else max(0.01, deadline - time.monotonic())
                peer.channel.sock.settimeout(left)
                if self._read_reason(peer) is None:
                    return

    def rank_0_has_succeeded(self) -> bool:
        """Ranks 1..N-1: return True if rank 0 has closed its connection and has not sent the reason of a failure."""
        for peer in self._peers:
            peer.channel.sock.setblocking(False)
            while messages := self._read_reason(peer):
                pass
            if messages is not None:
                return False
        return self.ended.get(0, DONE) == DONE

    def _read_reason(self, peer: Peer) -> list[dict[str, Any]] | None:
        """Return what Peer.read returns, and keep the reason in `ended` if the other end sends why it leaves."""
        messages = peer.read()
        for message in messages or []:
            if "bye" in message and peer.rank is not None:
                self.ended[peer.rank] = str(message["bye"])[:MAX_REASON_CHARS]
        return messages

    # --- the thread ---

    def _run(self) -> None:
        last = sent = time.monotonic()
        while not self._leaving.is_set() and self.verdict is None:
            for key, _ in self._selector.select(PERIOD_S / 2):
                self._accept() if key.data is None else self._receive(key.data)
            now = time.monotonic()
            if now - last > 1.0:  # this process itself was frozen and could not read messages
                for peer in self._peers:
                    peer.last_message = min(peer.last_message + now - last, now)  # never later than now
            last = now
            if now - sent >= PERIOD_S:
                sent = now
                self._send_heartbeat()
            self._judge(now)
        if self.verdict is not None:
            self._send_to_all(_verdict_message(self.verdict))
            self._known.set()
            self.end(self.verdict)
        else:
            refused = {"refused": self._refused} if self._refused else {}
            self._send_to_all({"bye": self._leave_reason, "rank": self.rank} | refused)

    def _add(self, connection: socket.socket) -> Peer:
        connection.setblocking(False)
        peer = Peer(Channel(connection, "a rank", MAX_LINE_BYTES), time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._peers.append(peer)
        return peer

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            unidentified = [peer for peer in self._peers if peer.rank is None]
            if len(unidentified) >= MAX_UNIDENTIFIED:
                self._drop(unidentified[0])  # the oldest: the newest may be a rank
            self._add(connection)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.channel.sock)
        peer.channel.sock.close()
        self._peers.remove(peer)

    def _receive(self, peer: Peer) -> None:
        if peer not in self._peers:  # dropped in the same round, because there were MAX_UNIDENTIFIED connections
            return
        messages = peer.read()
        if messages is None:
            self._drop(peer)
            if peer.rank is not None and peer.rank < self.size and peer.rank not in self.ended:
                self.ended[peer.rank] = CLOSED
                self._mark_failed(peer.rank, "is gone: its connection ended")
        for message in messages or []:
            if peer.rank is None and not self._identify(peer, message):
                self._drop(peer)
                break
            with contextlib.suppress(ValueError, TypeError, KeyError):  # ignore a malformed message
                self._handle(peer, message)

    def _identify(self, peer: Peer, message: dict[str, Any]) -> bool:
        rank = message.get("hello")
        if not token_matches(message.get("token"), self._token) or not isinstance(rank, int):
            return False
        if not 0 < rank < self.max_ranks:
            return False
        peer.rank = rank
        return True

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.last_message = time.monotonic()
        if peer.rank is None or peer.rank >= self.size:  # messages of a rank that does not train are ignored
            return
        self._keep_report(peer, message)
        if "step" in message:
            peer.step, peer.phase = int(message["step"]), str(message["phase"])[:32]
            self.steps[peer.rank] = peer.step
        if "verdict" in message:
            failed, why = message["verdict"], str(message["why"])[:MAX_LINE_BYTES]
            if failed == 0 == self.rank:
                self._lost_rank_0[peer.rank] = why  # judged after all messages of this round
            else:
                self._decide(PeerLost(why, failed if isinstance(failed, int) else None))
        elif "refused" in message and (peer.rank == 0 or self.rank == 0):
            if "bye" in message:
                self.ended[peer.rank] = str(message["bye"])[:MAX_REASON_CHARS]
            self._decide(SpecError(str(message["refused"])[:MAX_LINE_BYTES]))
        elif "bye" in message:
            why = str(message["bye"])[:MAX_REASON_CHARS]
            self.ended[peer.rank] = why
            if why not in (DONE, STOPPED):  # a rank that still waits for this one will report it as lost
                self._mark_failed(peer.rank, f"failed: {why}")
        elif message.get("wait_failed") and self._wait_failed_at is None and self.rank == 0:
            self._wait_failed_at = time.monotonic()

    def _keep_report(self, peer: Peer, message: dict[str, Any]) -> None:
        report = message.get("report")
        if peer.rank is not None and isinstance(report, dict) and isinstance(report.get("code"), int):
            failed = report.get("failed_rank")
            self.reports[peer.rank] = {
                "code": report["code"],
                "message": str(report.get("message"))[:MAX_REASON_CHARS],
                "failed_rank": failed if isinstance(failed, int) and 0 <= failed < self.size else None,
            }

    def _send_heartbeat(self) -> None:
        message: dict[str, Any] = {"step": self.step, "phase": self.phase}
        if self._wait_failed_at is not None:
            message["wait_failed"] = True
        self._send_to_all(message)

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if peer.rank is not None:
                peer.channel.try_send(message)

    # --- which rank failed ---

    def _judge(self, now: float) -> None:
        if self._lost_rank_0:
            return self._judge_rank_0()
        for peer in [p for p in self._peers if p.rank is None and now - p.since > HELLO_TIMEOUT_S]:
            self._drop(peer)
        ranks = [p for p in self._peers if p.rank is not None and p.rank < self.size and p.rank not in self.ended]
        silent = [peer for peer in ranks if now - peer.last_message > self.deadline]
        if not silent and self._wait_failed_at is not None and now - self._wait_failed_at > VERDICT_TIMEOUT_S / 3:
            silent = [peer for peer in ranks if now - peer.last_message > QUIET_S]
            if not silent and self.rank == 0:
                return self._judge_running(ranks)
        if silent and len(silent) == len(ranks) > 1:
            seconds = now - silent[0].last_message
            return self._mark_failed(self.rank, f"received nothing from the others for {seconds:.1f} s: it is cut off")
        if silent:
            worst = max(silent, key=lambda peer: now - peer.last_message)
            return self._mark_failed(worst.rank, f"is silent for {now - worst.last_message:.1f} s: frozen or cut off")
        return None

    def _judge_rank_0(self) -> None:
        """Decide that rank 0 is lost if most ranks report it. Otherwise the rank that reported it is cut off."""
        rank, why = next(iter(self._lost_rank_0.items()))
        if 2 * len(self._lost_rank_0) > self.size - 1:
            return self._decide(PeerLost(why, 0))
        return self._mark_failed(rank, "was cut off: it reported rank 0 as lost, which still runs")

    def _judge_running(self, ranks: list[Peer]) -> None:
        """Decide if all ranks send heartbeats, but a wait failed: name a rank that was stopped, or that is behind."""
        stopped = [rank for rank, why in self.ended.items() if why == STOPPED]
        if stopped:
            return self._mark_failed(stopped[0], "was stopped")
        progress = [(peer.step, peer.phase == WAITING, peer.rank or 0) for peer in ranks]
        progress = sorted([*progress, (self.step, self.phase == WAITING, self.rank)])
        if self.own_method and all(waits for _, waits, _ in progress):
            return self._decide(self._deadlock(progress[0][0]))
        (step, waits, last), *others = progress
        if others and others[0][:2] != (step, waits):
            return self._mark_failed(last, f"is behind: it runs, but is still in step {step + 1}")
        return self._decide(PeerLost(f"all ranks run, but a wait failed in step {step + 1}", None))

    def _deadlock(self, step: int) -> TestbedError:
        """Return the verdict if all ranks run and all wait in the user's method: it names the method and no rank."""
        waits = "all ranks run, but a rank waits for what no other sends"
        way_out = "Give every receive one send of the same size, in the same order on both ends (docs/modes.md)"
        if self.trying:
            where = "(known numbers, before the first step)"
            return SpecError(f"deadlock in {self.own_method}: {waits} {where}. {way_out}, then try again.")
        slow = f", or one exchange takes longer than the deadline of {self.deadline:g} s"
        longer = f"; if the network is that slow, use {setting('deadline', math.ceil(2 * self.deadline))}"
        return PeerLost(f"deadlock in {self.own_method}: {waits}{slow}, in step {step + 1}. {way_out}{longer}", None)

    def _mark_failed(self, rank: int | None, why: str) -> None:
        if rank == 0 and self.rank != 0:
            why += f" (reported by rank {self.rank})"
        self._decide(PeerLost(f"rank {rank} (node{rank}) {why}", rank))

    def _decide(self, verdict: TestbedError) -> None:
        if self.verdict is None:
            self.verdict = verdict


def _fit(text: str) -> str:
    """Return the text, cut so that its JSON has at most MAX_REFUSAL_BYTES."""
    while len(json.dumps(text)) > MAX_REFUSAL_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def _verdict_message(verdict: TestbedError) -> dict[str, Any]:
    if isinstance(verdict, PeerLost):
        return {"verdict": verdict.failed_rank, "why": str(verdict)}
    return {"refused": _fit(str(verdict))}


# --- the end of a rank ---------------------------------------------------------------------------------------------

LAST_VERDICT_TIMEOUT_S = 1.0  # for a verdict about a rank that has just ended to arrive


class Watchdog:
    """Ends this rank with `exit_once`. The main thread sets the attributes as soon as they exist."""

    def __init__(self, rank: int, terminate: Callable[[int], object] = os._exit) -> None:
        self.rank = rank
        self.recorder: Recorder | None = None
        self.heartbeat: Heartbeat | None = None
        self.training = False  # False until all ranks have joined
        # Called with the error record before the process ends.
        self.after_failure: Callable[[Error], None] | None = None
        self._terminate = terminate
        self._begun = threading.Lock()

    def exit_once(self, error: Exception) -> NoReturn:
        """Record the failure, inform the other ranks, and end the process with the error's exit code.

        The first thread that calls this ends the process. Any other thread blocks until then.
        """
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()
        ignore_signals()
        error = self._find_cause(error)
        if isinstance(error, OSError) and is_full(error):
            error = DiskFull(str(os_failure(error, self.recorder.folder.path if self.recorder else runs_dir())))
        record = record_failure(error, self.rank, self.recorder)
        if self.heartbeat and not isinstance(error, PeerLost):
            # Every rank detects these errors itself, so no failed rank is reported.
            common = isinstance(error, Interrupted | ReplicasDiffer | NetworkInvalid)
            reason = STOPPED if common else f"{type(error).__name__}: {error}"[:500]
            self.heartbeat.leave(reason, refused=str(error) if isinstance(error, UsageError) else "")
        if self.after_failure:
            self.after_failure(record)
        flush()
        self._terminate(record.code)
        raise SystemExit(record.code)  # reached only if a test replaced os._exit

    def _find_cause(self, error: Exception) -> Exception:
        """Return the verdict that names the failed rank if another rank may have caused the error, else the error."""
        if self.heartbeat is None:
            return error
        if (isinstance(error, RuntimeError) and is_lost_peer(error)) or type(error) is RankFailed:
            return self.heartbeat.identify_lost() or error
        if isinstance(error, NetworkInvalid):  # the probe failed, perhaps because a rank died
            return self.heartbeat.wait_for_verdict(LAST_VERDICT_TIMEOUT_S) or error
        return error


def record_failure(error: Exception, rank: int, recorder: Recorder | None) -> Error:
    """Log the reason, write the error as the rank's last record, and return the record. It has the exit code."""
    record = describe_failure(error, rank)
    log.error(record.message)
    if recorder:
        with contextlib.suppress(OSError):  # a full disk must not hide the exit code
            recorder.write(record)
    return record


def describe_failure(error: Exception, rank: int) -> Error:
    """Return the error record. An unexpected exception is also logged with its traceback."""
    if isinstance(error, TestbedError):
        failed_rank = error.failed_rank if isinstance(error, PeerLost) else None
        return Error(code=error.exit_code, message=str(error), failed_rank=failed_rank, at=time.monotonic())
    if isinstance(error, RuntimeError) and is_lost_peer(error):
        return Error(code=PeerLost.exit_code, message=f"rank {rank} lost a peer: {error}", at=time.monotonic())
    log.error("unexpected error", exc_info=error)
    return Error(code=TestbedError.exit_code, message=f"{type(error).__name__}: {error}", at=time.monotonic())


def is_lost_peer(error: RuntimeError) -> bool:
    """Return True if the error means that another rank is lost. Gloo and the store say so only in the text."""
    text = str(error).lower()
    return any(sign in text for sign in ("gloo", "connection", "timed out", "timeout", "socket", "broken pipe"))


def flush() -> None:
    """Flush stdout and stderr, because os._exit does not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a closed stream
            stream.flush()


BLOCK_BYTES = 8 << 20
MAX_BLOCKS = 128  # 1 GiB: without a memory limit the allocation must end before the machine has no memory left
_blocks: list[bytes] = []


def install_oom_handler(spec: RunSpec) -> None:
    """Install the handler of SIGUSR1, but only in runs whose spec contains the fault `oom`."""
    if any(fault.kind == "oom" for fault in spec.faults):
        signal.signal(signal.SIGUSR1, _allocate)


def _allocate(signum: int, frame: FrameType | None) -> None:
    for _ in range(MAX_BLOCKS):
        _blocks.append(b"\1" * BLOCK_BYTES)  # written to, so that the kernel allocates the pages
    allocated = f"{MAX_BLOCKS * BLOCK_BYTES >> 20} MiB"
    raise MemoryError(f"fault oom: allocated {allocated} without reaching a memory limit. Leave the fault out")
