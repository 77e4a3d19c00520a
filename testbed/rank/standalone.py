"""A run without a controller: `python -m testbed.rank.standalone` on every node, as `docker compose up` starts it.

Any launcher will do that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: torchrun, srun, a Kubernetes Job.

Every rank reads the same request from its environment (asked.py). Rank 0 names the run, makes its folder and tells
the others through the store; together they measure the network, train, and stay until rank 0 has summed up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from testbed.rank import presence, watchdog
from testbed.rank.asked import Asked, ask
from testbed.rank.conclusion import Conclusion
from testbed.results.folder import RunFolder, fresh_folder, runs_dir, write_whole
from testbed.results.records import Error
from testbed.spec.errors import Interrupted, PeerLost, TestbedError
from testbed.spec.run import RunSpec

if TYPE_CHECKING:  # torch takes a second to import: only who trains does
    import torch.distributed as dist

    from testbed.rank.recorder import Recorder

PRESENCE, PROBE = 1, 2  # ports after the store's
LINGER = 120.0  # seconds that a rank stays at most for rank 0 to sum up
LINGER_LOST = 3.0  # the same once a rank was lost


def main() -> int:
    """Take part; the exit code is the error's own (spec/errors.py)."""
    watchdog.raise_interrupted()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what the store warns of is said in our own words
    try:
        asked = ask(os.environ)
        with _presence(asked) as connection:
            asked = _settle(asked, connection)
            code = _take_part(asked, connection) if asked.rank < asked.spec.world else _stand_by(asked)
            if asked.rank > 0 and code != Interrupted.exit_code:
                for number in watchdog.SIGNALS:  # nothing is left to write down
                    signal.signal(number, lambda *_: os._exit(code))
                linger = LINGER_LOST if code == PeerLost.exit_code else LINGER
                presence.outlast(connection, linger if asked.rank < asked.spec.world else None)
        return code
    except TestbedError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _presence(asked: Asked) -> socket.socket:
    if asked.rank == 0:
        return presence.listen(asked.master, asked.port + PRESENCE, asked.spec.nodes)
    return presence.attend(asked.master, asked.port + PRESENCE)


def _settle(asked: Asked, connection: socket.socket) -> Asked:
    """One concrete interface for Gloo, which would otherwise go by the host's name: the one that leads to rank 0."""
    if asked.interface:
        return asked
    name = presence.interface_of(connection.getsockname()[0])
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return dataclasses.replace(asked, interface=name)


def _stand_by(asked: Asked) -> int:
    print(f"mode {asked.spec.mode}: rank 0 trains alone, rank {asked.rank} has nothing to do", flush=True)
    return 0


def _take_part(asked: Asked, connection: socket.socket) -> int:
    """Meet the others, then live through the run; from the folder on, files say what happened."""
    from testbed.rank.group import open_store
    from testbed.rank.recorder import Recorder

    store = open_store(asked.rank, asked.spec.world, asked.master, asked.port, asked.spec.start_deadline)
    folder, spec = _agree(asked, store)
    with _log(folder.log(asked.rank)), Recorder(folder.records(asked.rank)) as recorder:
        conclusion = Conclusion(asked, spec, folder)
        watchdog.insist(lambda error: os._exit(_end(error, recorder, conclusion)))
        try:
            invalid = _live(asked, spec, store, recorder, conclusion, connection)
        except Exception as error:
            watchdog.ignore()
            return _end(error, recorder, conclusion, store)
        return conclusion.good() if asked.rank == 0 else invalid


def _agree(asked: Asked, store: dist.Store) -> tuple[RunFolder, RunSpec]:
    """Rank 0 makes the folder and says where it is and what runs; whoever was asked something else says so."""
    if asked.rank == 0:
        path = asked.folder or fresh_folder(runs_dir() / asked.spec.experiment, asked.spec.name)
        spec = asked.spec.model_copy(update={"name": path.name})
        _make(path, spec)
        place = str(path.relative_to(runs_dir()))
        print(
            f"run {place}: {spec.mode}, {spec.model} on {spec.data.name}, {spec.world} rank{'s' * (spec.world > 1)}",
            flush=True,
        )
        store.set("run", json.dumps({"folder": place, "spec": spec.to_json()}))
    told = json.loads(_wait(store, "run", asked))
    (runs_dir() / told["folder"]).mkdir(parents=True, exist_ok=True)  # where nodes share no disk
    return RunFolder(runs_dir() / told["folder"]), RunSpec.from_json(told["spec"], "the spec of rank 0")


def _make(path: Path, spec: RunSpec) -> None:
    folder = RunFolder(path)
    if path.exists():  # made by the entrypoint, which may do what this process may not
        write_whole(folder.spec, spec.to_json())
    else:
        folder.create(spec)


def _wait(store: dist.Store, key: str, asked: Asked) -> bytes:
    """One value, or who has not set it within the deadline."""
    try:
        store.wait([key], timedelta(seconds=asked.spec.start_deadline))
        return bytes(store.get(key))
    except RuntimeError as error:
        message = f"rank 0 (node0) did not say {key!r} to rank {asked.rank} in {asked.spec.start_deadline:g} s: {error}"
        raise PeerLost(message, failed_rank=0) from None


def _live(
    asked: Asked,
    spec: RunSpec,
    store: dist.TCPStore,
    recorder: Recorder,
    conclusion: Conclusion,
    connection: socket.socket,
) -> int:
    """Measure, train, and return what the exit code will be: 0, or 5 where the network is not the one asked for."""
    import torch

    from testbed.rank.checkpoint import Checkpoints
    from testbed.rank.counters import open_counter
    from testbed.rank.group import alone, enter, leave, naming
    from testbed.rank.train import Trainer

    torch.set_num_threads(spec.threads)
    addresses = _meet(asked, spec, store)
    valid = conclusion.measure(addresses, asked.port + PROBE) if spec.world > 1 else True

    def end(lost: PeerLost) -> None:
        code = _end(lost, recorder, conclusion, store)
        if asked.rank > 0 and lost.failed_rank != 0:
            presence.outlast(connection, LINGER_LOST)
        os._exit(code)

    group = enter(asked.rank, spec.world, store, spec.start_deadline, end) if spec.world > 1 else alone()
    keeper = Checkpoints(spec, conclusion.folder.checkpoints, group) if spec.checkpoint else None
    with naming(group):
        Trainer(spec, group, recorder, open_counter(asked.interface), keeper).run()
        leave(group)
    return 0 if valid else 5


def _meet(asked: Asked, spec: RunSpec, store: dist.Store) -> list[str]:
    """All ranks' addresses, in rank order; rank 0 names those who did not come."""
    store.set(f"address/{asked.rank}", presence.own_address(asked.master))
    keys = [f"address/{rank}" for rank in range(spec.world)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=spec.start_deadline))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        names = ", ".join(f"rank {rank}" for rank in missing)
        message = f"{names} did not come within {spec.start_deadline:g} s. See their logs"
        raise PeerLost(message, failed_rank=missing[0])
    return [store.get(key).decode() for key in keys]


def _end(error: Exception, recorder: Recorder, conclusion: Conclusion, store: dist.Store | None = None) -> int:
    """Write down why, let go of the peers so that they need not wait, and let rank 0 sum up."""
    from testbed.rank.outcome import fail

    with conclusion.once() as first:
        if not first:  # the other thread is at it, and ends the process
            threading.Event().wait()
        record = fail(error, conclusion.asked.rank, recorder)
        if store is not None and record.code != Interrupted.exit_code:
            _let_go(record, conclusion.asked, store)
        if conclusion.asked.rank == 0:
            conclusion.bad(record, store)
    return record.code


def _let_go(record: Error, asked: Asked, store: dist.Store) -> None:
    """Tell rank 0 why, and hang up on the peers."""
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{asked.rank}", json.dumps({"code": record.code, "message": record.message}))
    presence.hang_up(keep=(asked.port, asked.port + PRESENCE))


class _Tee:
    """A stream that also goes to a file."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()


@contextmanager
def _log(path: Path) -> Iterator[None]:
    """What is printed goes to the container's log and to rankN.log."""
    with path.open("a", encoding="utf-8", buffering=1) as copy:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, copy), _Tee(err, copy)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a Gloo thread that still waits for a dead peer must not keep the process
