"""Checkpoints: the whole state of a rank, as safetensors and JSON. No pickle.

    checkpoints/rank0-step10.safetensors   parameters, buffers, optimizer state, state of the mode, random generators
    checkpoints/rank0-step10.json          written last: step, checksum of the tensors, sums of the epoch so far

Each rank writes its own two files. A file gets its name only when it is complete. A rank keeps its last two
checkpoints: killed ranks may be one checkpoint apart, and a resumed run begins at the last step of which all ranks have
a checkpoint. With every:K ranks may be K steps apart, so more checkpoints are kept. The position in the data is not
stored: batches follow from seed, rank and epoch, and a resumed run draws the batches of the epoch again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from testbed.rank.group import Group
from testbed.rank.optim import Optimizer
from testbed.rank.replicas import parameter_hash
from testbed.rank.sync.synchronizer import Synchronizer
from testbed.results.folder import read_bounded, write_whole
from testbed.spec.errors import SpecError, refuse
from testbed.spec.run import SCHEMA, RunSpec

if TYPE_CHECKING:  # train imports this module
    from testbed.rank.train import Tally

log = logging.getLogger(__name__)
MIN_KEPT = 2  # checkpoints per rank
MAX_JSON_BYTES = 1 << 20
# A tensor file has at most EXTRA_BYTES + MAX_RATIO times the bytes of the parameters.
MAX_RATIO = 16
EXTRA_BYTES = 64 << 20
_NAME = re.compile(r"rank(\d{1,4})-step(\d{1,9})\.json", re.ASCII)


class Trained(Protocol):
    """The state that a checkpoint holds; the Trainer has these attributes."""

    model: nn.Module
    optimizer: Optimizer
    sync: Synchronizer
    seen: Tally


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The content of the JSON file."""

    rank: int
    world: int
    step: int
    sha256: str  # of the file of tensors
    parameters: str  # hash, compared with those of the other ranks
    seen: tuple[float, int, int]  # loss, correct, images of the epoch so far
    python: list[Any]  # state of `random`
    schema: int = SCHEMA


class Checkpoints:
    """The checkpoints of one rank. `resume`: this run continues from them."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        group: Group,
        resume: bool = False,
        extra_bytes: int = EXTRA_BYTES,
        max_ratio: int = MAX_RATIO,
    ) -> None:
        self.extra_bytes, self.max_ratio = extra_bytes, max_ratio
        self.every, self.group, self.resume = spec.checkpoint, group, resume
        self.must_agree = spec.replicas_must_agree and spec.mode.synchronous
        self.folder = folder
        apart = spec.mode.every if spec.mode.every > 1 else 0  # steps by which ranks may differ
        self.kept = MIN_KEPT + math.ceil(apart / (spec.checkpoint or 1))

    def write_if_due(self, trained: Trained, step: int, last: bool) -> None:
        """Write a checkpoint if `step` is a multiple of the interval. After the last step no checkpoint is needed."""
        if self.every and step % self.every == 0 and not last:
            self.write(trained, step)

    def write(self, trained: Trained, step: int) -> None:
        """Write the tensors, then the JSON that makes them valid, then delete old checkpoints."""
        from safetensors.torch import save

        self.folder.mkdir(exist_ok=True)
        data = save(collect(trained))
        write_whole(self._tensors(step), data, durable=True)
        seen = trained.seen
        metadata = Metadata(
            rank=self.group.rank,
            world=self.group.size,
            step=step,
            sha256=hashlib.sha256(data).hexdigest(),
            parameters=parameter_hash(trained.model),
            seen=(seen.loss, seen.correct, seen.labels),
            python=_as_lists(random.getstate()),
        )
        write_whole(self._metadata(step), json.dumps(asdict(metadata)), durable=True)
        # Only earlier steps count: a run that started again may find useless checkpoints of later steps.
        for old in sorted(other for other in self._steps() if other <= step)[: -self.kept]:
            self._metadata(old).unlink(missing_ok=True)
            self._tensors(old).unlink(missing_ok=True)

    def agree(self, trained: Trained) -> int:
        """Return the last step of which all ranks have a valid checkpoint; 0 if there is no such step."""
        if not self.resume:
            return 0
        own = {step: metadata.parameters for step, metadata in self._valid(trained)}
        found = [json.loads(text) for text in self.group.all_gather_text("checkpoints", json.dumps(own))]
        for step in sorted(own, reverse=True):
            hashes = [other.get(str(step)) for other in found]
            if None not in hashes and (len(set(hashes)) == 1 or not self.must_agree):
                return step
        if any(found):
            have = "; ".join(f"rank {rank}: {', '.join(steps) or 'none'}" for rank, steps in enumerate(found))
            log.info("no checkpoint is common to all ranks (of steps: %s), starting from the beginning", have)
        return 0

    def load(self, trained: Trained, step: int) -> None:
        """Restore the state of `step`. Raises SpecError if the checkpoint does not fit."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path, metadata = self._tensors(step), self._read(step)
        data = self._checked(metadata, trained)
        try:
            restore(load(data), trained)
            random.setstate(_as_tuples(metadata.python))
        except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, SafetensorError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SpecError(f"{path}: does not fit this run ({reason}). Remove it, or start again.") from None
        trained.seen.loss, trained.seen.correct, trained.seen.labels = metadata.seen

    def _valid(self, trained: Trained) -> Iterator[tuple[int, Metadata]]:
        """Yield step and metadata of every valid checkpoint, in order of steps. Damaged checkpoints are left out."""
        for step in sorted(self._steps()):
            with contextlib.suppress(SpecError):
                metadata = self._read(step)
                self._checked(metadata, trained)
                yield step, metadata

    def _checked(self, metadata: Metadata, trained: Trained) -> bytes:
        """Return the tensor file. Raises SpecError if it is too large for this model, or if its checksum is wrong."""
        path = self._tensors(metadata.step)
        parameters = sum(p.numel() * p.element_size() for p in trained.model.parameters())
        data = read_bounded(path, self.extra_bytes + self.max_ratio * parameters)
        if hashlib.sha256(data).hexdigest() != metadata.sha256:
            raise SpecError(f"{path}: its checksum is wrong. Remove it, and an earlier one is used.")
        return data

    def _read(self, step: int) -> Metadata:
        path = self._metadata(step)
        try:
            values = json.loads(read_bounded(path, MAX_JSON_BYTES))
            metadata = Metadata(**values)
            right = (metadata.rank, metadata.world, metadata.step, metadata.schema)
            loss, correct, images = metadata.seen
            texts = isinstance(metadata.sha256, str) and isinstance(metadata.parameters, str)
            if right != (self.group.rank, self.group.size, step, SCHEMA) or not texts:
                rule = "is of another rank, number of ranks, step or schema"
                raise refuse("checkpoint", path.name, rule, "Remove it.")
            return Metadata(**values | {"seen": (float(loss), int(correct), int(images))})
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise SpecError(f"{path}: damaged ({str(error).splitlines()[0][:200]}). Remove it.") from None

    def _steps(self) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("rank*.json")]
        return [int(match[2]) for match in names if match and int(match[1]) == self.group.rank]

    def _tensors(self, step: int) -> Path:
        return self.folder / f"rank{self.group.rank}-step{step}.safetensors"

    def _metadata(self, step: int) -> Path:
        return self.folder / f"rank{self.group.rank}-step{step}.json"


def collect(trained: Trained) -> dict[str, Tensor]:
    """Return the whole state as named tensors, copied. Communication in flight is finished first."""
    trained.sync.flush()
    found = {f"sync.{key}": value for key, value in trained.sync.state().items()}
    found |= {f"model.{key}": value for key, value in trained.model.state_dict().items()}
    found |= {f"optimizer.{key}": value for key, value in trained.optimizer.state().items()}
    found |= {f"random.{key}": value for key, value in _random().items()}
    return {key: value.detach().clone().contiguous() for key, value in found.items()}


def restore(tensors: dict[str, Tensor], trained: Trained) -> None:
    """Restore what `collect` returned. Raises if a name or a shape does not fit."""
    parts: dict[str, dict[str, Tensor]] = {"sync": {}, "model": {}, "optimizer": {}, "random": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        parts[part][key] = tensor
    _load_model(trained.model, parts["model"])
    trained.optimizer.load(parts["optimizer"])
    trained.sync.load(parts["sync"])
    torch.set_rng_state(parts["random"]["torch"])
    number = parts["random"]["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", number[:624], int(number[624]), 0, 0.0))


def _load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the values in place, because parameters may be views of a mode's buffers. Raises ValueError."""
    own = model.state_dict()
    if own.keys() != tensors.keys():
        raise ValueError(f"other tensors than the model's: {sorted(own.keys() ^ tensors.keys())[:3]}")
    with torch.no_grad():
        for key, value in own.items():
            if (value.shape, value.dtype) != (tensors[key].shape, tensors[key].dtype):
                raise ValueError(f"{key} is {tuple(tensors[key].shape)}, the model's is {tuple(value.shape)}")
            value.copy_(tensors[key])


def _random() -> dict[str, Tensor]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return {"torch": torch.get_rng_state(), "numpy": torch.tensor([*map(int, keys), int(position)], dtype=torch.int64)}


def _as_lists(state: tuple[Any, ...]) -> list[Any]:
    version, numbers, gauss = state
    return [version, list(numbers), gauss]


def _as_tuples(state: list[Any]) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, tuple(numbers), gauss
