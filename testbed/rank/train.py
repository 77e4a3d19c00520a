"""The training loop, the same for all modes: `sync` is the synchronizer that the spec requests."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from testbed.rank.checkpoint import Checkpoints
from testbed.rank.counters import Counter, CpuMeter
from testbed.rank.data import Batches, Dataset, Partition, test_batches
from testbed.rank.group import LATE_DEADLINES, Group
from testbed.rank.models import untrack_statistics
from testbed.rank.recorder import Profiler, Recorder, describe_environment
from testbed.rank.replicas import compare, compare_data, share_statistics
from testbed.rank.sync.buckets import choose_bucket, trained
from testbed.rank.sync.check import check_mode
from testbed.rank.sync.schedules import build
from testbed.rank.workload import open_workload
from testbed.results.records import End, Eval, Start, Step
from testbed.results.timeline import Timeline
from testbed.spec import quota_signal
from testbed.spec.errors import TestbedError
from testbed.spec.run import STEP_DEADLINE_S, RunSpec

log = logging.getLogger(__name__)
LOG_STEPS = 20  # between two lines of rankN.log, as in the reports
LOG_INTERVAL_S = 5.0  # seconds between two lines, if LOG_STEPS take longer


class Trainer:
    """The state of one rank while it trains; `run` is the loop."""

    def __init__(
        self, spec: RunSpec, group: Group, recorder: Recorder, counter: Counter, checkpoints: Checkpoints | None = None
    ) -> None:
        self.spec, self.group, self.recorder, self.counter = spec, group, recorder, counter
        self.checkpoints = checkpoints
        work = open_workload(spec, recorder.folder, group.rank)
        torch.manual_seed(spec.seed)  # equal parameters on every rank
        random.seed(spec.seed)  # the user's own file may draw from these two
        np.random.seed(spec.seed)
        dtype = getattr(torch, spec.dtype)
        self.train_set, self.test_set = work.datasets()
        self.batches = self._batches(dtype)
        self.total = _total_steps(spec, len(self.batches))
        self.model = work.model(self.train_set, dtype)
        if spec.batchnorm == "untracked":
            untrack_statistics(self.model)
        self.optimizer = work.optimizer(self.model, self.total)
        self.timeline = Timeline(detailed=spec.spans)
        self.profiler = self._profiler() if spec.profile else None
        size = gradient_bytes(self.model)
        self.choice = choose_bucket(spec.mode, size, group, spec.limiting_rates, recorder.earlier_mode())
        self.spec = spec = spec.model_copy(update={"mode": self.choice.mode})
        self.sync = build(spec.mode, spec.placement, group, self.timeline, spec.seed)
        # The mean over ranks gives each rank the same weight. With uneven shares each image must have the same weight.
        self.weight = spec.local_batch(group.rank) * spec.world / spec.global_batch
        self.cpu = CpuMeter()
        self.seen = Tally()
        self.logged = 0.0  # when the last line was logged
        group.set_deadline(deadline(spec, size))

    def run(self) -> None:
        """Train, test, and check that the replicas agree. Writes all records of this rank."""
        self._record_start()
        patience_s = LATE_DEADLINES * self.group.deadline.total_seconds()
        if not quota_signal.wait(patience_s):
            raise TestbedError(f"not all ranks were ready within {patience_s:g} s, so no CPU quota was applied")
        compare_data((self.train_set, self.test_set), self.group)
        self._compare(0)
        check_mode(self.spec, self.model, self.group)
        module = self.sync.attach(self.model, self.optimizer)
        begun = time.monotonic()
        step = self._resume(module)
        before, _ = self.counter.read()
        for epoch in self._epochs(step):
            first = epoch * len(self.batches)  # the first step of this epoch; a resumed run may begin after it
            self.seen = Tally() if step == first else self.seen
            batches = itertools.islice(self.batches.epoch(epoch), step - first, None)
            for _ in range(min(first + len(self.batches), self.total) - step):
                if step >= self.spec.warmup:
                    self.cpu.begin()
                if self.profiler:
                    self.profiler.before(step, self.sync.flush)
                self.recorder.write(self._step(module, batches, step, epoch))
                self.sync.verify()
                if self.profiler:
                    self.profiler.after(step, self.sync.flush)
                step += 1
                if self.checkpoints:
                    self.checkpoints.write_if_due(self, step, last=step == self.total)
            self.cpu.end()
            self.sync.close() if step == self.total else self.sync.flush()
            self._evaluate(step, epoch)
        sent, received = self.counter.read()
        seconds, payload, messages = time.monotonic() - begun, dict(self.group.payload), dict(self.group.messages)
        self.recorder.write(
            End(
                steps=step,
                seconds=seconds,
                sent=sent,
                received=received,
                before=before,
                payload=payload,
                messages=messages,
                **self.cpu.fields(),
            )
        )

    def _resume(self, module: nn.Module) -> int:
        """Restore the last common checkpoint and return the number of steps done; 0 if there is none."""
        step = self.checkpoints.agree(self) if self.checkpoints else 0
        if self.checkpoints and step:
            if self.sync.needs_warmup_step:
                self.timeline.start()
                self._forward_backward(module, *next(self.batches.epoch(0)))
                self.timeline.take()
            self.checkpoints.load(self, step)
            self.recorder.copy_earlier(step)
            log.info("resumed after step %d", step)
        return step

    def _step(self, module: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], step: int, epoch: int) -> Step:
        """Do one step (clear gradients, forward, loss, backward, synchronise and update), and return its record."""
        self.timeline.start()
        self.group.at(step, "compute")
        with self.timeline.phase("data"):
            images, labels = next(batches)
        self.sync.zero()
        loss = self._forward_backward(module, images, labels)
        self.group.at(step, "sync")
        with self.timeline.phase("sync"):
            self.sync.step()
        times = self.timeline.take()
        sent, received = self.counter.read()
        self._log_step(step, loss, times["total"])
        return Step(step=step, epoch=epoch, loss=loss, images=len(labels), sent=sent, received=received, **times)

    def _log_step(self, step: int, loss: float, seconds: float) -> None:
        """Log a line every LOG_STEPS steps or LOG_INTERVAL_S seconds."""
        if step % LOG_STEPS == LOG_STEPS - 1 or time.monotonic() - self.logged >= LOG_INTERVAL_S:
            self.logged = time.monotonic()
            log.info("step %d/%d loss %.4f %.3f s", step + 1, self.total, loss, seconds)

    def _forward_backward(self, module: nn.Module, images: Tensor, labels: Tensor) -> float:
        """Run one pass, or one per micro-batch, and return the loss. The gradients add up to that of the whole batch.

        Images are assigned to micro-batches as to ranks: four micro-batches of one node are the shares of four nodes.
        """
        passes = self.spec.passes(self.group.rank)
        micro_batches = [(images[k::passes], labels[k::passes]) for k in range(min(passes, len(labels)))]
        loss_sum = 0.0
        for number, (x, y) in enumerate(micro_batches, start=1):
            with self.sync.accumulating() if number < len(micro_batches) else nullcontext():
                with self.timeline.phase("forward"):
                    logits = module(x)
                    loss = mean_loss(logits, y)
                with self.timeline.phase("backward"):
                    (loss * (self.weight * len(y) / len(labels))).backward()
            self.seen.add(loss.item(), logits.detach(), y)
            loss_sum += loss.item() * len(y)
        return loss_sum / len(labels)

    def _evaluate(self, step: int, epoch: int) -> None:
        """Compare and test the replicas after an epoch. With every:K only at the end: replicas differ until then."""
        if step < self.total and not self.spec.mode.synchronous:
            return
        self._compare(step)
        self.group.at(step, "test")
        if self.spec.evaluate != "never":
            found = evaluate(self.spec, self.model, self.test_set, self.group, step=step, epoch=epoch, seen=self.seen)
            self.recorder.write(found)
            log.info("epoch %d test loss %.4f correct %d/%d", epoch, found.loss, found.correct, found.images)
        if self.spec.evaluate == "every-rank":
            # Wait here, so that the next step does not count the wait for the slowest rank's test.
            self.group.all_gather_text(f"tested/{step}", "")

    def _compare(self, step: int) -> None:
        """Compare the parameters of all ranks after `step` steps. Called before the first step and before each test.

        Raises ReplicasDiffer if they differ before the first step, or later in a mode that keeps replicas equal.
        """
        must_agree = step == 0 or self.spec.replicas_must_agree
        self.recorder.write(compare(self.model, self.group, step, must_agree))

    def _record_start(self) -> None:
        parameters = trained(self.model)
        self.recorder.write(
            Start(
                rank=self.group.rank,
                world=self.group.size,
                unix=time.time(),
                parameters=sum(p.numel() for p in parameters),
                gradient_bytes=gradient_bytes(self.model),
                deadline=self.group.deadline.total_seconds(),
                tensors=len(parameters),
                counter=self.counter.name,
                environment=describe_environment(),
                dilation=self.spec.dilation or 1.0,
                mode=str(self.choice.mode) if self.choice.why else "",
                chosen=self.choice.why,
            )
        )
        if self.choice.why:
            log.info("%s", self.choice.why)

    def _epochs(self, step: int) -> range:
        """Return the epochs that are left. The first is that of the last step done, because its test may be missing."""
        return range(max(0, step - 1) // len(self.batches), -(-self.total // len(self.batches)))

    def _profiler(self) -> Profiler:
        folder, rank = self.recorder.folder, self.group.rank
        profiler = Profiler(self.spec.warmup, self.total - 1, folder.trace(rank), folder.profile(rank))
        self.timeline.mark = profiler.mark
        return profiler

    def _batches(self, dtype: torch.dtype) -> Batches:
        spec, rank = self.spec, self.group.rank
        partition = Partition(
            size=len(self.train_set),
            batch=spec.global_batch,
            seed=spec.seed,
            kind=spec.data.partition,
            shares=spec.data.shares if spec.uneven else None,
        )
        return Batches(self.train_set, partition, rank, spec.world, spec.data.augment, spec.seed, dtype)


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of all gradients: S in the formulas of docs and reports."""
    return sum(p.numel() * p.element_size() for p in trained(model))


def deadline(spec: RunSpec, size: int) -> float:
    """Return the seconds that one wait may take: the requested deadline, else one from the slowest rate.

    The default is STEP_DEADLINE_S plus twice the time of N gradients at the slowest rate of a link or a fault. With
    every:K ranks synchronise only every K steps, so STEP_DEADLINE_S counts K times, but at most 30 times. Time dilation
    multiplies every deadline.
    """
    slower = spec.dilation or 1.0
    if spec.deadline is not None:
        return spec.deadline * slower
    rates = [rate for rate in (*spec.limiting_rates, *(fault.rate for fault in spec.faults)) if rate]
    transfer = 2 * spec.world * size * 8 / min(rates) if rates else 0.0
    return slower * (STEP_DEADLINE_S * min(spec.mode.every, 30) + transfer)


def _total_steps(spec: RunSpec, per_epoch: int) -> int:
    """Return the smaller of the requested steps and the steps of the requested epochs."""
    limits = [spec.steps, spec.epochs * per_epoch if spec.epochs else None]
    return min(limit for limit in limits if limit is not None)


# --- test the model -------------------------------------------------------------------------------------------------


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, averaged over labels. There is a label for each image, or for each token."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Tally:
    """Sums of loss and correct answers over labels. There is a label for each image, or for each token."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.correct = 0
        self.labels = 0

    def add(self, loss: float, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch. `loss` is the mean over these labels."""
        self.loss += loss * labels.numel()
        self.correct += int((logits.argmax(-1) == labels).sum())
        self.labels += labels.numel()

    def mean_loss(self) -> float:
        return self.loss / max(1, self.labels)

    def accuracy(self) -> float:
        return self.correct / max(1, self.labels)


def evaluate(
    spec: RunSpec, model: nn.Module, dataset: Dataset, group: Group, *, step: int, epoch: int, seen: Tally
) -> Eval:
    """Test the model and return the record. `seen` has the sums of training in this epoch.

    With spec.evaluate = "split" each rank tests its share of the images, and the sums of all ranks are recorded.
    """
    share_statistics(model, group, spec.batchnorm)
    split = spec.evaluate == "split" and group.size > 1
    tally = _test(model, dataset, group, split, getattr(torch, spec.dtype))
    loss, correct, labels = _sum(tally, group, f"eval/{step}") if split else (tally.loss, tally.correct, tally.labels)
    return Eval(
        step=step,
        epoch=epoch,
        loss=loss / labels,
        correct=correct,
        images=labels,
        scope="all ranks" if split else "this rank",
        train_loss=seen.mean_loss(),
        train_accuracy=seen.accuracy(),
    )


def _test(model: nn.Module, dataset: Dataset, group: Group, split: bool, dtype: torch.dtype) -> Tally:
    tally = Tally()
    model.eval()
    with torch.no_grad():
        for images, labels in test_batches(dataset, group.rank, group.size, split, dtype=dtype):
            logits = model(images)
            tally.add(float(mean_loss(logits, labels)), logits, labels)
    model.train()
    return tally


def _sum(tally: Tally, group: Group, key: str) -> tuple[float, int, int]:
    parts = [part.split() for part in group.all_gather_text(key, f"{tally.loss!r} {tally.correct} {tally.labels}")]
    return sum(float(p[0]) for p in parts), sum(int(p[1]) for p in parts), sum(int(p[2]) for p in parts)
