"""Test the model: each rank a share of the images and the sums added up, or every rank all of them."""

from __future__ import annotations

import torch
from torch import nn

from testbed.rank.data import Dataset, test_batches
from testbed.rank.group import Group
from testbed.rank.replicas import share_statistics
from testbed.spec.records import Eval
from testbed.spec.run import RunSpec


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
