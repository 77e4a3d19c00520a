"""The nodes of a run: made for it and removed with it, or kept for the next run of a sweep that needs equal ones.

With the nodes the receipt is kept: as long as they are up and nothing has changed their network, the next run does not
measure it again, for REUSE_S at most. Nodes are not kept after a run that failed, was interrupted, is invalid or had
faults, nor where nodes are bound to one run's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from testbed.control.runs.locks import Lock, machine_lock
from testbed.control.runs.select import SubstrateChoice, node_plans
from testbed.control.substrates.base import NodePlan, Substrate
from testbed.results.receipt import Receipt
from testbed.spec.run import RunSpec

REUSE_S = 600.0  # after which the network is measured again
# The plans of all nodes with a rank, the number of those without, and the folder of the runs' folders.
Key = tuple[Sequence[NodePlan], int, Path]


@dataclass
class Nodes:
    """Nodes that are up. `receipt`: what was measured on them, at `measured_at` of the monotonic clock."""

    substrate: Substrate
    receipt: Receipt | None = None
    measured_at: float = 0.0

    def keep(self, receipt: Receipt) -> None:
        """Keep a receipt that has just been measured."""
        self.receipt, self.measured_at = receipt, time.monotonic()

    def forget(self) -> None:
        """Let the next run measure the network again: the receipt may no longer describe it."""
        self.receipt = None

    def earlier_receipt(self) -> Receipt | None:
        """Return the receipt of an earlier run on these nodes, with its age; None if the network must be measured."""
        age = time.monotonic() - self.measured_at
        if self.receipt is None or age > REUSE_S or not self.receipt.valid():
            return None
        return self.receipt.model_copy(update={"measured_before": round(age, 1), "after": None})


@contextmanager
def shared_nodes(
    choice: SubstrateChoice, report: Callable[[str], None], lock: Lock = machine_lock
) -> Iterator[NodesOfRuns]:
    """Hold over several runs what each of them needs: the machine's lock or reserved nodes, and the nodes that are up.

    The nodes are removed before the rest is released.
    """
    with lock(choice, report), choice.type.reserve(report), NodesOfRuns() as nodes:
        yield nodes


class NodesOfRuns:
    """A context manager; leaving it removes what is kept."""

    def __init__(self) -> None:
        self._nodes: Nodes | None = None
        self._key: Key | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    @contextmanager
    def of(self, choice: SubstrateChoice, spec: RunSpec, folder: Path) -> Iterator[Nodes]:
        """Yield nodes as the spec requests them: those of the last run if they are equal, else new ones."""
        key: Key = (node_plans(spec), spec.nodes - spec.world, folder.resolve().parent)
        if self._nodes is None or self._key != key:
            self.discard()
            substrate = choice.make(spec, folder)
            self._nodes, self._key = Nodes(substrate.__enter__()), key
        kept = not spec.faults and choice.type.keeps_nodes(spec)
        try:
            yield self._nodes
            if kept and self._nodes is not None:
                self._nodes.substrate.stop()  # if a process cannot be ended, its node is not kept
        except BaseException:
            self.discard()  # not by an ExitStack, which would hide the exception that an error in here replaces
            raise
        if not kept:
            self.discard()

    def discard(self) -> None:
        """Remove the nodes, if there are any."""
        nodes, self._nodes, self._key = self._nodes, None, None
        if nodes is not None:
            nodes.substrate.__exit__(None, None, None)
