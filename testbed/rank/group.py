"""Group: communication between the ranks of one run. Gloo over TCP; every wait has a deadline."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from testbed.net.channel import listen
from testbed.net.endpoint import address_of, route_to
from testbed.rank.watchdog import LAST_VERDICT_TIMEOUT_S, Heartbeat
from testbed.spec.errors import PeerLost, TestbedError, Unavailable, refuse
from testbed.spec.fabric import Racks
from testbed.spec.words import setting

LATE_DEADLINES = 10  # a rank may be later than another by this number of deadlines at a test or a comparison
BACKLOG = 128
LOOPBACK = "127.0.0.1"


class NoWork:
    """Replaces dist.Work for an empty tensor. Nothing is sent: both ends know that the size is 0."""

    def wait(self, timeout: timedelta) -> bool:
        return True


Work = dist.Work | NoWork


class Group:
    """Point-to-point and collective calls on one process group. A fake for tests has the same methods."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        deadline: float,
        heartbeat: Heartbeat | None = None,
        racks: Racks = (),
        rate: float | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.racks = racks  # the ranks of each rack; empty: one switch connects all
        self.rate = rate  # byte/s of payload on the slowest link, as measured before training; None: unknown
        self.round_trip_s = 0.0  # the longest requested round-trip time of all paths; 0: no delay is requested
        self.store = store
        self.heartbeat = heartbeat
        self.deadline = timedelta(seconds=deadline)
        self.payload: Counter[str] = Counter()  # bytes sent, by kind
        self.messages: Counter[str] = Counter()  # how often, by kind
        self.kind = "gradients"  # the kind that the next bytes are counted as
        self._counting = threading.Lock()

    @property
    def address(self) -> str:
        """This rank's address for connections of its own: that of the interface that Gloo uses."""
        own = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or (self.heartbeat.address if self.heartbeat else "")
        store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        on_the_way = route_to(store.host, store.port) if isinstance(store, dist.TCPStore) and not own else ""
        return own or on_the_way or LOOPBACK

    @contextmanager
    def payload_kind(self, kind: str) -> Iterator[None]:
        """Count the bytes that are sent in the `with` block under this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of all later waits, including the waits inside Gloo's own collectives."""
        self.deadline = timedelta(seconds=seconds)
        if dist.is_initialized():
            dist.distributed_c10d._set_pg_timeout(self.deadline)
        if self.heartbeat:
            self.heartbeat.deadline = seconds

    def at(self, step: int, phase: str) -> None:
        """Set the step and phase that this rank's heartbeats report. Phase `sync`: the rank waits for the others."""
        if self.heartbeat:
            self.heartbeat.at(step, phase)

    def count(self, size: int, kind: str | None = None) -> None:
        """Count `size` bytes as sent by this rank."""
        with self._counting:
            self.payload[kind or self.kind] += size
            self.messages[kind or self.kind] += 1

    def send(self, tensor: Tensor, to: int, tag: int = 0, kind: str | None = None) -> Work:
        """Start to send a contiguous tensor and return the work. The tensor must not change before `wait`."""
        self.count(tensor.nbytes, kind)
        return dist.isend(tensor, dst=to, tag=tag) or NoWork() if tensor.numel() else NoWork()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        """Start to receive into a contiguous tensor and return the work."""
        return dist.irecv(tensor, src=source, tag=tag) or NoWork() if tensor.numel() else NoWork()

    def wait(self, *works: Work) -> None:
        """Wait until all works are finished. Raises RuntimeError if a peer is gone, or silent until the deadline."""
        for work in works:
            work.wait(self.deadline)

    def exchange(self, out: Tensor, into: Tensor, peer: int) -> None:
        """Send to and receive from one peer at the same time."""
        incoming = self.receive(into, peer)
        self.wait(self.send(out, peer), incoming)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks in place, by torch's own all_reduce."""
        self.count_all_reduce(tensor)
        dist.all_reduce(tensor)

    def count_all_reduce(self, tensor: Tensor) -> None:
        """Count the bytes that a ring sends from this rank for one all_reduce of `tensor`."""
        self.count(2 * (self.size - 1) * tensor.nbytes // self.size)

    def all_gather_text(self, key: str, value: str) -> list[str]:
        """Set this rank's value of `key`, and return those of all ranks in rank order. Uses the store, not Gloo."""
        self.at(self.heartbeat.step if self.heartbeat else 0, "sync")
        self.store.set(f"{key}/{self.rank}", value)
        self.count(len(value) if self.size > 1 else 0, "metrics")
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self.store.wait(keys, LATE_DEADLINES * self.deadline)
        return [self.store.get(k).decode() for k in keys]


def join(
    rank: int,
    size: int,
    address: str,
    port: int,
    deadline: float,
    end: Callable[[TestbedError], object] = lambda error: None,
) -> Group:
    """Connect to the other ranks through address:port, where rank 0 listens, and return the group of all ranks.

    `end` is called with the error when a rank is lost. Raises PeerLost if a rank is missing at the deadline.
    """
    return make_group(connect(rank, size, address, port, deadline, end), deadline)


def connect(
    rank: int,
    size: int,
    address: str,
    port: int,
    deadline: float,
    end: Callable[[TestbedError], object],
    max_ranks: int | None = None,
) -> Heartbeat:
    """Open the store and start the heartbeat. Raises PeerLost if rank 0 does not answer.

    `end` is called with the error when a rank is lost. `max_ranks`: see Heartbeat.
    """
    store = open_store(rank, size, address, port, deadline)
    heartbeat = Heartbeat(rank, size, store, deadline, end, max_ranks)
    try:
        heartbeat.start(deadline)
    except (RuntimeError, OSError) as error:
        message = f"rank 0 (node0) did not answer rank {rank} within {deadline:g} s: {error}"
        raise PeerLost(message, 0) from None
    return heartbeat


def open_store(rank: int, size: int, address: str, port: int, deadline: float) -> dist.TCPStore:
    """Return the store at address:port: rank 0 opens it, the others connect. Raises PeerLost if rank 0 is not reached.

    If torchrun has opened a store there, all ranks connect to it.
    """
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # "True": torchrun's agent listens already
    listener = _listen(address, port) if rank == 0 and own_store else None
    try:
        return dist.TCPStore(
            address,
            port,
            size,
            is_master=rank == 0 and own_store,
            timeout=timedelta(seconds=deadline),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
    except RuntimeError as error:  # DistStoreError and others
        message = f"rank {rank} could not reach rank 0 (node0) at {address}:{port} within {deadline:g} s: {error}"
        raise PeerLost(message, failed_rank=0) from None


def make_group(heartbeat: Heartbeat, deadline: float, racks: Racks = ()) -> Group:
    """Make the default process group of all ranks on the heartbeat's store; return it. Raises PeerLost."""
    rank, size, store = heartbeat.rank, heartbeat.size, heartbeat.store
    try:
        keys = [f"here/{other}" for other in range(size)]
        store.set(keys[rank], "1")
        await_all(store, keys, deadline)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=deadline))
    except PeerLost as lost:  # reported before this rank leaves, else the others would report this rank as lost
        raise heartbeat.report_lost(lost) from None
    except (RuntimeError, OSError) as error:
        message = f"rank {rank} did not connect to all of {size} ranks within {deadline:g} s: {error}"
        raise heartbeat.wait_for_verdict(LAST_VERDICT_TIMEOUT_S) or PeerLost(message) from None
    return Group(rank, size, store, deadline, heartbeat, racks)


def await_all(store: dist.Store, keys: Sequence[str], deadline: float) -> None:
    """Wait until every rank has set its key; `keys` are in rank order. Raises PeerLost, which names missing ranks."""
    try:
        store.wait(list(keys), timedelta(seconds=deadline))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            names = ", ".join(f"rank {rank} (node{rank})" for rank in missing)
            raise PeerLost(f"{names} did not connect within {deadline:g} s", failed_rank=missing[0]) from None


def single_rank_group() -> Group:
    """Return the group of a single rank, which has the same calls and does not communicate."""
    return Group(0, 1, dist.HashStore(), 1.0)


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only. The store alone would listen on all of the machine.

    Raises Unavailable if the address or the port cannot be used.
    """
    try:
        return listen(address, port, BACKLOG)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # socket.create_server repeats the address there
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            rule = f"rank 0 cannot listen there ({why})"
            way_out = "Set it to an address of rank 0's machine."
            raise refuse("MASTER_ADDR", address, rule, way_out, Unavailable) from None
        way_out = f"Set another with {setting('port', 'N')}."
        raise Unavailable(f"port {port} on {address}: cannot listen ({why}). {way_out}") from None


def leave(group: Group) -> None:
    """Leave the group. Rank 0 leaves last, because its process hosts the store."""
    if group.size == 1:
        return
    group.store.set(f"done/{group.rank}", "1")
    if group.rank == 0:
        group.store.wait([f"done/{rank}" for rank in range(group.size)], LATE_DEADLINES * group.deadline)
    if group.heartbeat:
        group.heartbeat.leave()
    dist.destroy_process_group()
