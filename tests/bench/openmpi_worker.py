"""One rank of the Open MPI benchmark; mpirun starts it on every node.

openmpi_worker.py FILE REPEATS ELEMENTS INTERFACE SIZE    rank 0 writes the seconds and bytes to FILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from testbed.rank.counters import InterfaceCounter

if TYPE_CHECKING:
    from mpi4py import MPI


def main(file: Path, repeats: int, elements: int, interface: str, size: int) -> None:
    """Time the in-place mean of a buffer over all ranks, and check it. The first round is not counted."""
    from mpi4py import MPI

    world, counter = MPI.COMM_WORLD, InterfaceCounter(interface)
    if world.size != size:
        raise SystemExit(f"MPI made {world.size} ranks, {size} were requested: mpi4py and mpirun are of different MPIs")
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
    world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)  # the time of a collective is that of its slowest rank
    if world.rank == 0:
        library = MPI.Get_library_version().partition(",")[0]
        file.write_text(json.dumps({"seconds": seconds[1:].tolist(), "sent": sent, "library": library}))


def _sent(world: MPI.Comm, counter: InterfaceCounter) -> int:
    """Return the bytes sent so far. The barrier is needed: the last bytes leave after Allreduce has returned."""
    world.Barrier()
    sent, _ = counter.read()
    if sent is None:
        raise SystemExit(f"no interface {counter.interface} on the node of rank {world.rank}")
    return sent


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
