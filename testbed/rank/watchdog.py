"""Heartbeat: who is dead, who is silent, who is behind; apart from Gloo, so that it works when Gloo waits.

Every rank holds one connection to rank 0, over which both ends beat. Rank 0 listens at the store's address, on a port
that it tells through the store together with a token; who does not know the token is nobody. A closed connection is
a dead rank, seen at once; one that is silent for longer than the deadline is frozen or cut off. Rank 0 passes the
verdict on; when rank 0 itself is lost, all others see that alone. Whoever learns a verdict ends, even if its main
thread is stuck inside Gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from testbed.spec.errors import Interrupted, PeerLost

# Stopping: SIGTERM and SIGINT end a rank soon, even one that waits inside Gloo.
#
# Python's own handlers run when the main thread is back in Python, which may be a slow network's whole all-reduce
# later. The kernel's handler writes the signal's number to a pipe at once; a thread reads it there, gives the main
# thread a few seconds, and then ends the rank itself.

GRACE = 3.0  # seconds for the main thread to raise, write down and leave
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def raise_interrupted() -> None:
    """SIGTERM and SIGINT raise Interrupted in the main thread; signals held back until now arrive."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def insist(end: Callable[[Interrupted], None]) -> None:
    """Call `end` from a thread when a signal came and the main thread did not react within GRACE."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, end), daemon=True).start()


def ignore() -> None:
    """From here on there is nothing left to interrupt."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _watch(reading: int, end: Callable[[Interrupted], None]) -> None:
    name = signal.Signals(os.read(reading, 1)[0]).name
    threading.Event().wait(GRACE)
    end(Interrupted(f"stopped by {name} while it waited for others"))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    ignore()  # a second one must not interrupt the writing down
    raise Interrupted(f"stopped by {signal.Signals(signum).name}")


PERIOD = 0.25  # seconds between two beats
QUIET = 1.5  # seconds of silence that make a rank suspect once somebody complains
HELLO = 5.0  # seconds for a new connection to say who it is
PATIENCE = 3.0  # seconds in which a rank that lost a peer waits to learn which
MAX_LINE = 4096  # bytes of one message
MAX_STRANGERS = 64  # connections that have not said who they are
BACKLOG = 1024  # in front of the door: whom the kernel turns away comes back only after a second
KEY = "heartbeat"  # in the store
DONE, STOPPED = "done", "stopped"  # farewells of a rank that did not fail
WAITS = "sync"  # the phase in which a rank waits for others


@dataclass
class Peer:
    """The other end of one connection."""

    connection: socket.socket
    heard: float
    rank: int | None = None  # None: has not said
    step: int = 0
    phase: str = "start"
    left: str | None = None  # why it went, when it said so
    pending: bytes = b""  # half a message that came
    unsent: bytes = b""  # half a message that did not go
    since: float = field(default_factory=time.monotonic)

    def read(self) -> list[dict[str, Any]] | None:
        """Whole messages that have arrived; None when the other end is gone or talks nonsense."""
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        if len(self.pending) > MAX_LINE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def send(self, message: dict[str, Any]) -> None:
        """A beat that does not fit is left out: the next one comes soon. Half of one is finished first."""
        data = self.unsent or json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.unsent = data[self.connection.send(data) :]


class Heartbeat:
    """One thread per rank; `end` is called with the verdict, and does not come back."""

    def __init__(
        self, rank: int, size: int, store: dist.TCPStore, deadline: float, end: Callable[[PeerLost], None]
    ) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.deadline = deadline
        self.step, self.phase = 0, "start"  # the main thread's own words about itself
        self.end = end
        self.verdict: PeerLost | None = None
        self._known = threading.Event()  # set with the verdict
        self._complaint: float | None = None  # since when the main thread wants to know
        self._closing = threading.Event()
        self._farewell = ""
        self._peers: list[Peer] = []
        self._gone: dict[int, str] = {}  # ranks that left, with their reason
        self._accusers: dict[int, str] = {}  # ranks that gave up rank 0, which is this one, with their reason
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None  # rank 0's
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self, deadline: float) -> None:
        """Rank 0 listens, the others connect; `deadline` seconds for rank 0 to say where."""
        if self.rank == 0:
            self._token = secrets.token_hex(16)
            family = socket.AF_INET6 if ":" in self.store.host else socket.AF_INET
            self._listener = socket.create_server((self.store.host, 0), family=family, backlog=BACKLOG)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            where = {"port": self._listener.getsockname()[1], "token": self._token}
            self.store.set(KEY, json.dumps(where))
        else:
            self.store.wait([KEY], timedelta(seconds=deadline))
            where = json.loads(self.store.get(KEY))
            connection = socket.create_connection((self.store.host, where["port"]), timeout=deadline)
            hub = self._add(connection)
            hub.rank = 0
            hub.send({"hello": self.rank, "token": where["token"]})
        self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """What the main thread is about to do; the next beat tells it."""
        self.step, self.phase = step, phase

    def ask(self) -> PeerLost | None:
        """Whom did we lose? Called by the main thread after an error; None when nobody can be named."""
        self._complaint = time.monotonic()
        return self.learn(PATIENCE)

    def accuse(self, lost: PeerLost) -> PeerLost:
        """The main thread knows whom we lost: the others hear it before this rank leaves. An earlier verdict stands."""
        self._settle(lost)
        return self.learn(PATIENCE) or lost

    def learn(self, seconds: float) -> PeerLost | None:
        """The verdict, where there is one within so many seconds; by then the others were told."""
        if self._thread.is_alive():
            self._known.wait(seconds)
        return self.verdict

    def close(self, farewell: str = DONE) -> None:
        """Leave in good order (`done`), or say why this rank fails."""
        if self._thread.ident is None or threading.current_thread() is self._thread:
            return
        self._farewell = farewell
        self._closing.set()
        self._thread.join(2 * PERIOD + 0.5)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = beaten = time.monotonic()
        while not self._closing.is_set() and self.verdict is None:
            for key, _ in self._selector.select(PERIOD / 2):
                self._accept() if key.data is None else self._hear(key.data)
            now = time.monotonic()
            if now - last > 1.0:  # this process was frozen itself, and could not hear
                for peer in self._peers:
                    peer.heard = min(peer.heard + now - last, now)  # who was heard again already gets no credit
            last = now
            if now - beaten >= PERIOD:
                beaten = now
                self._beat()
            self._judge(now)
        if self.verdict is not None:
            self._tell({"verdict": self.verdict.failed_rank, "why": str(self.verdict)})
            self._known.set()
            self.end(self.verdict)
        else:
            self._tell({"bye": self._farewell, "rank": self.rank})
        for end in [peer.connection for peer in self._peers] + ([self._listener] if self._listener else []):
            end.close()
        self._selector.close()

    def _add(self, connection: socket.socket) -> Peer:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._peers.append(peer)
        return peer

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            strangers = [peer for peer in self._peers if peer.rank is None]
            if len(strangers) >= MAX_STRANGERS:
                self._drop(strangers[0])  # the newest may be one of us
            self._add(connection)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _hear(self, peer: Peer) -> None:
        if peer not in self._peers:  # dropped a moment ago, to make room
            return
        messages = peer.read()
        if messages is None:
            self._drop(peer)
            if peer.rank is not None and peer.rank not in self._gone:
                self._condemn(peer.rank, "is gone: its connection ended")
        for message in messages or []:
            if peer.rank is None and not self._introduce(peer, message):
                self._drop(peer)
                break
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a message that is none of ours says nothing
                self._understand(peer, message)

    def _introduce(self, peer: Peer, message: dict[str, Any]) -> bool:
        rank, token = message.get("hello"), message.get("token")
        said = token.encode("utf-8", "replace") if isinstance(token, str) else b""
        known = secrets.compare_digest(said, self._token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self.size:
            return False
        peer.rank = rank
        return True

    def _understand(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "step" in message:
            peer.step, peer.phase = int(message["step"]), str(message["phase"])[:32]
        if "verdict" in message:
            failed_rank, why = message["verdict"], str(message["why"])[:MAX_LINE]
            if failed_rank == 0 == self.rank and peer.rank is not None:
                self._accusers[peer.rank] = why  # weighed when all that came with it is heard
            else:
                self._settle(PeerLost(why, failed_rank if isinstance(failed_rank, int) else None))
        elif "bye" in message and peer.rank is not None:
            self._leave(peer.rank, str(message["bye"])[:1000])
        elif message.get("complains") and self._complaint is None and self.rank == 0:
            self._complaint = time.monotonic()

    def _leave(self, rank: int, why: str) -> None:
        """Done, or stopped, is no fault yet: only who waits for it will complain. Anything else is."""
        self._gone[rank] = why
        if why not in (DONE, STOPPED):
            self._condemn(rank, f"failed: {why}")

    def _beat(self) -> None:
        message: dict[str, Any] = {"step": self.step, "phase": self.phase}
        if self._complaint is not None:
            message["complains"] = True
        self._tell(message)

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if peer.rank is not None:
                peer.send(message)

    # --- judgement -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        if self._accusers:
            return self._weigh(*next(iter(self._accusers.items())))
        for peer in [p for p in self._peers if p.rank is None and now - p.since > HELLO]:
            self._drop(peer)
        ranks = [peer for peer in self._peers if peer.rank is not None and peer.rank not in self._gone]
        silent = [peer for peer in ranks if now - peer.heard > self.deadline]
        if not silent and self._complaint is not None and now - self._complaint > PATIENCE / 3:
            silent = [peer for peer in ranks if now - peer.heard > QUIET]
            if not silent and self.rank == 0:
                return self._blame_the_living(ranks)
        if silent and len(silent) == len(ranks) > 1:
            return self._condemn(
                self.rank, f"heard none of the others for {now - silent[0].heard:.1f} s: it is cut off"
            )
        if silent:
            worst = max(silent, key=lambda peer: now - peer.heard)
            return self._condemn(worst.rank, f"is silent for {now - worst.heard:.1f} s: frozen or cut off")
        return None

    def _weigh(self, rank: int, why: str) -> None:
        """Rank 0 was given up, and lives: most of the others are right, fewer confess that they were cut off."""
        if 2 * len(self._accusers) > self.size - 1:
            return self._settle(PeerLost(why, 0))
        return self._condemn(rank, "was cut off: it gave up rank 0, which lives")

    def _blame_the_living(self, ranks: list[Peer]) -> None:
        """All beat, and yet somebody waited in vain: one has left, or one is behind."""
        stopped = [rank for rank, why in self._gone.items() if why == STOPPED]
        if stopped:
            return self._condemn(stopped[0], "was stopped")
        standing = [(peer.step, peer.phase == WAITS, peer.rank or 0) for peer in ranks]
        standing = sorted([*standing, (self.step, self.phase == WAITS, self.rank)])
        (step, waits, last), *others = standing
        if others and others[0][:2] != (step, waits):
            return self._condemn(last, f"is behind: it lives, but is still in step {step + 1}")
        return self._settle(PeerLost(f"all ranks live, and yet one waited in vain in step {step + 1}", None))

    def _condemn(self, rank: int | None, why: str) -> None:
        if rank == 0 and self.rank != 0:
            why += f" (seen by rank {self.rank})"
        self._settle(PeerLost(f"rank {rank} (node{rank}) {why}", rank))

    def _settle(self, verdict: PeerLost) -> None:
        if self.verdict is None:
            self.verdict = verdict
