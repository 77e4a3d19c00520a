"""The reference: torch's DistributedDataParallel, with a hook that times each bucket.

DDP compares the hook's annotations with types, so here they must not be strings.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from testbed.rank.sync.base import NoSync, Update


class DDP(NoSync):
    """torch's own. BatchNorm buffers are left to the run's own setting, as in every mode.

    Backward ends when the last bucket has come back. DDP calls the hook for that bucket when the last gradient is
    there, so from that call to the end of backward the loop computes nothing: it is blocked.
    """

    rehearses = True  # the first backward decides how buckets are packed, and so in which order sums are made

    def attach(self, model: Module, update: Update) -> Module:
        super().attach(model, update)
        megabytes = self.mode.bucket / 2**20 if self.mode.bucket else None
        self.module = DistributedDataParallel(model, bucket_cap_mb=megabytes, broadcast_buffers=False)
        self.last_call: float | None = None
        if self.timeline.detailed:
            self.module.register_comm_hook(None, self._timed_all_reduce)
        return self.module

    def accumulating(self) -> AbstractContextManager[object]:
        return self.module.no_sync()

    def step(self) -> None:
        if self.last_call is not None:
            self.timeline.was_blocked(since=self.last_call)
        super().step()

    def _timed_all_reduce(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DDP does without a hook, bit for bit: scale, then sum."""
        buffer = bucket.buffer().mul_(1.0 / self.group.size)
        self.group.count_all_reduce(buffer)
        self.last_call = self.timeline.clock()
        token = self.timeline.depart(f"bucket {bucket.index()}", buffer.nbytes)

        def arrived(future: Future[list[Tensor]]) -> Tensor:
            self.timeline.arrive(token)
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(arrived)
