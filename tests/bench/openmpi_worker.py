"""One rank of Open MPI's side of the collective benchmark; mpirun starts it on every node.

openmpi_worker.py FILE REPEATS ELEMENTS INTERFACE SIZE    rank 0 writes what was found to FILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from testbed.rank.counters import InterfaceCounter


def main(file: Path, repeats: int, elements: int, interface: str, size: int) -> None:
    """Time the mean of a buffer over all ranks, in place like ours; the first round is dropped and checked."""
    world, counter = MPI.COMM_WORLD, InterfaceCounter(interface)
    if world.size != size:
        raise SystemExit(f"{size} ranks were asked, MPI made {world.size}: mpi4py found another MPI than mpirun's")
    buffer = np.full(elements, world.rank, np.float32)
    seconds = np.zeros(repeats + 1)
    begin = 0
    for repeat in range(repeats + 1):
        if repeat == 1:
            begin = _sent(world, counter)
        world.Barrier()
        begun = time.monotonic()
        world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        buffer /= size
        seconds[repeat] = time.monotonic() - begun
        if not (buffer == (size - 1) / 2).all():
            raise SystemExit(f"Allreduce gave rank {world.rank} {buffer.min()} to {buffer.max()}, not {(size - 1) / 2}")
    sent = world.allreduce((_sent(world, counter) - begin) / repeats) / size
    world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)  # a collective is over when its last rank is
    if world.rank == 0:
        library = MPI.Get_library_version().partition(",")[0]
        file.write_text(json.dumps({"seconds": seconds[1:].tolist(), "sent": sent, "library": library}))


def _sent(world: MPI.Comm, counter: InterfaceCounter) -> int:
    """Bytes so far; behind a barrier, since the last of them leave after the Allreduce has returned."""
    world.Barrier()
    sent, _ = counter.read()
    if sent is None:
        raise SystemExit(f"no interface {counter.interface} on the node of rank {world.rank}")
    return sent


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
