"""DDP: torch's DistributedDataParallel, the reference, with a hook that times each bucket; its codecs are hooks too.

DDP compares the hook's annotations with types, so this module must not import `annotations` from `__future__`.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from testbed.rank.sync.buckets import trained
from testbed.rank.sync.synchronizer import BaseSynchronizer, Update
from testbed.spec.errors import refuse
from testbed.spec.mode import REFERENCE

POWERSGD_FROM_STEP = 2  # torch needs one uncompressed step at least, and DDP rebuilds its buckets after the first
UNFINISHED = "finished reduction in the prior iteration"  # in DDP's error, one step after a gradient was missing


class Wrapped(DistributedDataParallel):
    """The wrapped model; raises SpecError with a way out where DDP raises about parameters without a gradient."""

    mode = REFERENCE  # in the user's spelling

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            rule = "the model has parameters that get no gradient, which DDP refuses"
            way_out = "Use allreduce or ring, where such a parameter counts as zero."
            raise refuse("mode", self.mode, rule, way_out) from None


class DDP(BaseSynchronizer):
    """torch's own schedule. BatchNorm buffers follow the run's own setting, as in every mode.

    Backward ends when the last bucket is averaged. DDP calls the hook for that bucket when the last gradient is
    complete, so from that call to the end of backward the loop computes nothing: it is blocked, and then it copies the
    last bucket back into the gradients.
    """

    needs_warmup_step = True  # the first backward decides which gradients share a bucket, and so the order of sums

    def attach(self, model: Module, update: Update) -> Module:
        super().attach(model, update)
        megabytes = self.mode.bucket / 2**20 if self.mode.bucket else None
        self.module = Wrapped(model, bucket_cap_mb=megabytes, broadcast_buffers=False)
        self.module.mode = str(self.mode)
        self.all_sent = False  # True from the call of the last bucket's hook until its last gradient is copied
        self.last_comm_end = 0.0  # on the timeline's clock
        if self.mode.codec == "powersgd":
            self.power = _power_state(int(self.mode.codec_number or 0))
            self.module.register_comm_hook(None, self._timed_power)
        elif self.mode.codec:
            self.module.register_comm_hook(None, self._timed_rounding)
        elif self.timeline.detailed:
            self.module.register_comm_hook(None, self._timed_all_reduce)
        if self.timeline.detailed:
            self._time_copies(trained(model))
        return self.module

    def accumulating(self) -> AbstractContextManager[object]:
        return self.module.no_sync()

    def step(self) -> None:
        self.update_parameters()

    def _time_copies(self, parameters: Iterable[Parameter]) -> None:
        """Record how long DDP takes to copy each gradient into its bucket and to call the hook of a full bucket.

        DDP does both in a hook of the node that accumulates the gradient. The post-accumulate hook is called before
        that one. Hooks of one node are called in the order of their registration, so ours is called after it.
        """
        since = self.timeline.now()

        def before(parameter: Tensor) -> None:
            nonlocal since
            since = self.timeline.now()

        def after(*gradients: object) -> None:
            self.timeline.copied(since)
            if self.all_sent:
                self.all_sent, self.waiting_since = False, self.timeline.now()
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(before)
            accumulate = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            accumulate.register_hook(after)  # type: ignore[union-attr]

    def _end_of_backward(self) -> None:
        """Called after DDP's own callback, which waits for each bucket and copies it back into the gradients.

        With several buckets it copies one while others are still in flight; that counts as blocked. After the last
        bucket there is only copying.
        """
        since, used = self.waiting_since
        averaged = max(since, self.last_comm_end)
        self.timeline.was_blocked(since, until=averaged)
        self.timeline.copied((averaged, used))

    def _timed_all_reduce(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DDP does without a hook, bit for bit: scale, then sum."""
        buffer = bucket.buffer().mul_(1.0 / self.group.size)
        token = self._begin_comm(bucket, buffer.nbytes)

        def finish(future: Future[list[Tensor]]) -> Tensor:
            self._record_end(token)
            return future.value()[0]

        reduced: Future[Tensor] = dist.all_reduce(buffer, async_op=True).get_future().then(finish)
        return reduced

    def _timed_rounding(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """torch's hooks for fp16 and bf16."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        token = self._begin_comm(bucket, 2 * bucket.buffer().numel())
        hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[
            self.mode.codec or ""
        ]
        return hook(self.module.process_group, bucket).then(lambda future: self._end_comm(token, future))

    def _timed_power(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """torch's PowerSGD. The hook waits for each bucket before the next.

        A bucket needs three collectives, one after the other. On Gloo those of two buckets would mix, in another order
        on each rank.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        before, uncompressed = self.power.total_numel_after_compression, self.power.iter < POWERSGD_FROM_STEP
        future = powerSGD_hook(self.power, bucket)
        buffer, numbers = bucket.buffer(), self.power.total_numel_after_compression - before
        token = self._begin_comm(bucket, buffer.element_size() * (buffer.numel() if uncompressed else numbers))
        finished = future.then(lambda done: self._end_comm(token, done))
        with self.timeline.blocked():
            finished.wait()
        return finished

    def _begin_comm(self, bucket: dist.GradBucket, size: int) -> int:
        self.group.count(2 * (self.group.size - 1) * size // self.group.size)
        self.all_sent = bucket.is_last()
        return self.timeline.begin_comm(f"bucket {bucket.index()}", size)

    def _end_comm(self, token: int, future: Future[Tensor]) -> Tensor:
        self._record_end(token)
        return future.value()

    def _record_end(self, token: int) -> None:
        self.timeline.end_comm(token)
        self.last_comm_end = self.timeline.clock()

    def state(self) -> dict[str, Tensor]:
        """What PowerSGD keeps from one step to the next."""
        if self.mode.codec != "powersgd":
            return {}
        kept = {"error": self.power.error_dict, "p": self.power.p_memory_dict, "q": self.power.q_memory_dict}
        named = {f"{name}.{number}": value for name, held in kept.items() for number, value in held.items()}
        return {"iter": torch.tensor(self.power.iter), **named}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.mode.codec != "powersgd":
            return
        self.power.iter = int(state["iter"])
        kept = {"error": self.power.error_dict, "p": self.power.p_memory_dict, "q": self.power.q_memory_dict}
        for name, value in state.items():
            kind, _, number = name.partition(".")
            if number:
                kept[kind][int(number)] = value.clone()


def _power_state(rank: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_FROM_STEP)
