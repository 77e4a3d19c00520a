"""The one training loop. It names no mode: `sync` is whatever the spec asked for."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from testbed.rank.checkpoint import Checkpoints
from testbed.rank.counters import Counter
from testbed.rank.data import Batches, Dataset, Partition, open_dataset, test_batches
from testbed.rank.group import Group
from testbed.rank.models import build_model, untrack_statistics, usual_shape
from testbed.rank.optim import Optimizer
from testbed.rank.profiler import Profiler
from testbed.rank.recorder import Recorder, Timeline, describe_environment
from testbed.rank.replicas import compare, share_statistics
from testbed.rank.sync.buckets import trained
from testbed.rank.sync.schedules import build
from testbed.results.records import End, Eval, Start, Step
from testbed.spec.datasets import data_dir
from testbed.spec.run import STEP_DEADLINE_S, RunSpec

# Test the model: each rank a share of the images and the sums added up, or every rank all of them.


class Tally:
    """Loss and correct answers over images seen."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.correct = 0
        self.images = 0

    def add(self, loss: float, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """`loss` is the mean over these images."""
        self.loss += loss * len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        self.images += len(labels)

    def mean_loss(self) -> float:
        return self.loss / max(1, self.images)

    def accuracy(self) -> float:
        return self.correct / max(1, self.images)


def evaluate(
    spec: RunSpec, model: nn.Module, dataset: Dataset, group: Group, *, step: int, epoch: int, seen: Tally
) -> Eval:
    """Loss and accuracy on the test set; `seen` is the training so far."""
    share_statistics(model, group, spec.batchnorm)
    split = spec.evaluate == "split" and group.size > 1
    tally = _test(model, dataset, group, split)
    loss, correct, images = _sum(tally, group, f"eval/{step}") if split else (tally.loss, tally.correct, tally.images)
    return Eval(
        step=step,
        epoch=epoch,
        loss=loss / images,
        correct=correct,
        images=images,
        scope="all ranks" if split else "this rank",
        train_loss=seen.mean_loss(),
        train_accuracy=seen.accuracy(),
    )


def _test(model: nn.Module, dataset: Dataset, group: Group, split: bool) -> Tally:
    tally = Tally()
    dtype = next(model.parameters()).dtype
    model.eval()
    with torch.no_grad():
        for images, labels in test_batches(dataset, group.rank, group.size, split, dtype=dtype):
            logits = model(images)
            tally.add(float(nn.functional.cross_entropy(logits, labels)), logits, labels)
    model.train()
    return tally


def _sum(tally: Tally, group: Group, key: str) -> tuple[float, int, int]:
    parts = [part.split() for part in group.tell_all(key, f"{tally.loss!r} {tally.correct} {tally.images}")]
    return sum(float(p[0]) for p in parts), sum(int(p[1]) for p in parts), sum(int(p[2]) for p in parts)


log = logging.getLogger(__name__)
LOG_STEPS = 20  # between lines of rankN.log, as the reports printed them
LOG_SECONDS = 5.0  # between lines where steps are slow


class Trainer:
    """What one rank holds while it trains; `run` is the loop."""

    def __init__(
        self, spec: RunSpec, group: Group, recorder: Recorder, counter: Counter, keeper: Checkpoints | None = None
    ) -> None:
        self.spec, self.group, self.recorder, self.counter = spec, group, recorder, counter
        self.keeper = keeper
        torch.manual_seed(spec.seed)  # identical parameters on every rank
        dtype = getattr(torch, spec.dtype)
        self.train_set = self._open(train=True, subset=spec.data.subset)
        self.test_set = self._open(train=False, subset=spec.data.test_subset)
        self.batches = self._batches(dtype)
        self.total = _total_steps(spec, len(self.batches))
        self.model = build_model(spec.model, self.train_set.classes, self.train_set.shape[0], dtype)
        if spec.batchnorm == "untracked":
            untrack_statistics(self.model)
        self.optimizer = Optimizer(spec.optimizer, self.model, spec.global_batch, self.total)
        self.timeline = Timeline(detailed=spec.spans)
        self.profiler = self._profiler() if spec.profile else None
        self.sync = build(spec.mode, spec.placement, group, self.timeline, spec.seed)
        # The mean over ranks weighs all alike; this makes it weigh all images alike when shares are uneven.
        self.weight = spec.local_batch(group.rank) * spec.world / spec.global_batch
        self.seen = Tally()
        self.said = 0.0  # when the last line was printed
        group.set_deadline(deadline(spec, gradient_bytes(self.model)))

    def run(self) -> None:
        """Train, test, and prove that the replicas agree."""
        self._record_start()
        self._compare(0)
        module = self.sync.attach(self.model, self.optimizer)
        begun = time.monotonic()
        step = self._resume(module)
        before, _ = self.counter.read()
        for epoch in self._epochs(step):
            first = epoch * len(self.batches)  # step of this epoch; a resumed run begins in its middle, or at its end
            self.seen = Tally() if step == first else self.seen
            batches = itertools.islice(self.batches.epoch(epoch), step - first, None)
            for _ in range(min(first + len(self.batches), self.total) - step):
                if self.profiler:
                    self.profiler.before(step, self.sync.flush)
                self.recorder.write(self._step(module, batches, step, epoch))
                if self.profiler:
                    self.profiler.after(step, self.sync.flush)
                step += 1
                if self.keeper:
                    self.keeper.maybe(self, step, last=step == self.total)
            self.sync.close() if step == self.total else self.sync.flush()
            self._look(step, epoch)
        sent, received = self.counter.read()
        seconds, payload = time.monotonic() - begun, dict(self.group.payload)
        self.recorder.write(
            End(steps=step, seconds=seconds, sent=sent, received=received, before=before, payload=payload)
        )

    def _resume(self, module: nn.Module) -> int:
        """Steps done by an earlier attempt, with its state put back; 0 where there was none."""
        step = self.keeper.agree(self) if self.keeper else 0
        if self.keeper and step:
            if self.sync.needs_warmup_step:
                self.timeline.start()
                self._forward_backward(module, *next(self.batches.epoch(0)))
                self.timeline.take()
            self.keeper.load(self, step)
            self.recorder.repeat(step)
            log.info("resumed after step %d", step)
        return step

    def _step(self, module: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], step: int, epoch: int) -> Step:
        """Zero, forward, loss, backward, synchronise and step."""
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
        self._say(step, loss, times["total"])
        return Step(step=step, epoch=epoch, loss=loss, images=len(labels), sent=sent, received=received, **times)

    def _say(self, step: int, loss: float, seconds: float) -> None:
        """A line for people, now and then."""
        if step % LOG_STEPS == LOG_STEPS - 1 or time.monotonic() - self.said >= LOG_SECONDS:
            self.said = time.monotonic()
            log.info("step %d/%d loss %.4f %.3f s", step + 1, self.total, loss, seconds)

    def _forward_backward(self, module: nn.Module, images: Tensor, labels: Tensor) -> float:
        """One pass, or several over parts of the batch whose gradients add up to the batch's mean.

        Parts are dealt like the ranks' shares: four parts of one node are what four nodes would have had.
        """
        passes = self.spec.passes(self.group.rank)
        parts = [(images[k::passes], labels[k::passes]) for k in range(min(passes, len(labels)))]
        loss_sum = 0.0
        for number, (x, y) in enumerate(parts, start=1):
            with self.sync.accumulating() if number < len(parts) else nullcontext():
                with self.timeline.phase("forward"):
                    logits = module(x)
                    loss = nn.functional.cross_entropy(logits, y)
                with self.timeline.phase("backward"):
                    (loss * (self.weight * len(y) / len(labels))).backward()
            self.seen.add(loss.item(), logits.detach(), y)
            loss_sum += loss.item() * len(y)
        return loss_sum / len(labels)

    def _look(self, step: int, epoch: int) -> None:
        """At the end of an epoch, and of the run; while replicas drift there is no one model to look at."""
        if step < self.total and not self.spec.mode.synchronous:
            return
        self._compare(step)
        self.group.at(step, "test")
        if self.spec.evaluate != "never":
            found = evaluate(self.spec, self.model, self.test_set, self.group, step=step, epoch=epoch, seen=self.seen)
            self.recorder.write(found)
            log.info("epoch %d test loss %.4f correct %d/%d", epoch, found.loss, found.correct, found.images)
        if self.spec.evaluate == "every-rank":
            self.group.tell_all(f"tested/{step}", "")  # the next step must not wait for the slowest tester

    def _compare(self, step: int) -> None:
        """All ranks start from, and end with, the same parameters."""
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
            )
        )

    def _epochs(self, step: int) -> range:
        """From the one that the last step done belongs to: its test may be missing."""
        return range(max(0, step - 1) // len(self.batches), -(-self.total // len(self.batches)))

    def _profiler(self) -> Profiler:
        folder, rank = self.recorder.folder, self.group.rank
        made = Profiler(self.spec.warmup, self.total - 1, folder.trace(rank), folder.shares(rank))
        self.timeline.mark = made.mark
        return made

    def _open(self, *, train: bool, subset: int | None) -> Dataset:
        name, seed = self.spec.data.name, self.spec.seed
        shape = usual_shape(self.spec.model) if name == "synthetic" else None
        return open_dataset(name, data_dir(), train=train, subset=subset, seed=seed, shape=shape)

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
    """S of every formula."""
    return sum(p.numel() * p.element_size() for p in trained(model))


def deadline(spec: RunSpec, size: int) -> float:
    """What was asked; else STEP_DEADLINE_S and twice the time of N gradients on the slowest link, be it a fault's.

    With every:K ranks meet after K steps only, so a slower one may honestly be late by K times as much.
    """
    if spec.deadline is not None:
        return spec.deadline
    links = [spec.link_of(rank).rate for rank in range(spec.world)]
    rates = [rate for rate in (*links, *(fault.rate for fault in spec.faults)) if rate]
    return STEP_DEADLINE_S * min(spec.mode.every, 30) + (2 * spec.world * size * 8 / min(rates) if rates else 0.0)


def _total_steps(spec: RunSpec, per_epoch: int) -> int:
    """Whichever ends first: the steps or the epochs asked for."""
    limits = [spec.steps, spec.epochs * per_epoch if spec.epochs else None]
    return min(limit for limit in limits if limit is not None)
