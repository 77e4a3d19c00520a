"""When the CPU quotas of nodes apply: to all steps, not to what is not timed.

Ranks import torch, connect and build their model without a quota. When all of them have recorded their start, quotas
are applied and the ranks are told so, by a signal; none takes a step before. When all ranks have recorded their last
step, the quotas are lifted, and the model is tested without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.control.runs.supervisor import RankObserver, RankState
from testbed.control.substrates.base import Substrate
from testbed.spec import quota_signal
from testbed.spec.run import RunSpec


class Quotas:
    """A RankObserver that applies and lifts the quotas; `inner` observes the ranks as well.

    A user's script takes steps at times that are not known, so its quotas apply from its start to its end. Where the
    number of steps is not known here, they are not lifted.
    """

    def __init__(self, spec: RunSpec, substrate: Substrate, inner: RankObserver) -> None:
        self._substrate, self._inner = substrate, inner
        self._later = substrate.late_quotas and spec.script is None
        self._steps = spec.steps if spec.script is None and spec.epochs is None else None
        self._applied, self._lifted = not self._later, False
        substrate.limit_cpus(not self._later)

    def environment(self) -> dict[str, str]:
        """The variables of a rank that has to wait for its quota."""
        return {quota_signal.VARIABLE: "1"} if self._later else {}

    def poll(self, ranks: Sequence[RankState]) -> None:
        """Apply the quotas when the last rank is ready, and lift them when the slowest has done its last step.

        `inner` waits until they apply, or a rank has ended: a fault may change the quota of one node.
        """
        if not self._applied and all(rank.started is not None for rank in ranks):
            self._substrate.limit_cpus(True)
            self._applied = True
            for rank in ranks:
                rank.process.signal(quota_signal.SIGNAL)
        if self._applied or any(rank.code is not None for rank in ranks):
            self._inner.poll(ranks)
        if self._steps is not None and not self._lifted and all(rank.last_step + 1 >= self._steps for rank in ranks):
            self._substrate.limit_cpus(False)
            self._lifted = True
