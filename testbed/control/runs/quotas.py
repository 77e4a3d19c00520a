"""The CPU quotas of nodes apply to the steps, not to the test of the model after the last step, which is not timed."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.control.runs.supervisor import RankObserver, RankState
from testbed.control.substrates.base import Substrate
from testbed.spec.run import RunSpec


class Quotas:
    """A RankObserver that applies the quotas at once, and lifts them when all ranks have recorded their last step.

    `inner` observes the ranks as well. Where the number of steps is not known here, the quotas stay.
    """

    def __init__(self, spec: RunSpec, substrate: Substrate, inner: RankObserver) -> None:
        self._substrate, self._inner = substrate, inner
        self._steps = spec.steps if spec.script is None and spec.epochs is None else None
        self._lifted = False
        substrate.limit_cpus(True)

    def poll(self, ranks: Sequence[RankState]) -> None:
        """Lift the quotas when the last step of the slowest rank is recorded."""
        self._inner.poll(ranks)
        if self._steps is not None and not self._lifted and all(rank.last_step + 1 >= self._steps for rank in ranks):
            self._substrate.limit_cpus(False)
            self._lifted = True
