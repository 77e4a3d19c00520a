"""Checkpoints: all that a rank needs to go on as if nothing had happened, as safetensors and JSON. No pickle.

    checkpoints/rank0-step10.safetensors   parameters, buffers, optimizer state, what the mode holds, random states
    checkpoints/rank0-step10.json          written last: step, checksum of the tensors, sums of the epoch so far

Each rank writes its own pair, whole or not at all, and keeps the last two: ranks may be one checkpoint apart when they
are killed, and then the last step that all of them have is taken. With every:K they may be K steps apart, and as many
more are kept as lie in K steps. The position in the data needs no state: batches follow from seed, rank and epoch, and
those of the epoch that were seen are drawn again.
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
KEPT = 2  # at least
MAX_FACTS = 1 << 20  # bytes of the JSON
MAX_RATIO = 16  # tensors of a checkpoint at most so many times the parameters, and MAX_SMALL
MAX_SMALL = 64 << 20  # bytes
_NAME = re.compile(r"rank(\d{1,4})-step(\d{1,9})\.json", re.ASCII)


class Trained(Protocol):
    """What a checkpoint is made of; the trainer has it."""

    model: nn.Module
    optimizer: Optimizer
    sync: Synchronizer
    seen: Tally


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The JSON beside the tensors."""

    rank: int
    world: int
    step: int
    sha256: str  # of the file of tensors
    parameters: str  # hash, to be compared with the other ranks'
    seen: tuple[float, int, int]  # loss, correct, images of the epoch so far
    python: list[Any]  # state of `random`
    schema: int = SCHEMA


class Checkpoints:
    """Of one rank, in one folder; `resume` says whether this run is to go on from them."""

    def __init__(self, spec: RunSpec, folder: Path, group: Group, resume: bool = False) -> None:
        self.every, self.group, self.resume = spec.checkpoint, group, resume
        self.must_agree = spec.replicas_must_agree and spec.mode.synchronous
        self.folder = folder
        apart = spec.mode.every if spec.mode.every > 1 else 0  # steps between ranks that do not meet in each
        self.kept = KEPT + math.ceil(apart / (spec.checkpoint or 1))

    def maybe(self, trained: Trained, step: int, last: bool) -> None:
        """Write one when it is time; after the last step there is nothing to come back to."""
        if self.every and step % self.every == 0 and not last:
            self.write(trained, step)

    def write(self, trained: Trained, step: int) -> None:
        """Tensors first, then the JSON that makes them count, then the oldest go."""
        from safetensors.torch import save

        self.folder.mkdir(exist_ok=True)
        data = save(collect(trained))
        write_whole(self._tensors(step), data, durable=True)
        seen = trained.seen
        facts = Facts(
            rank=self.group.rank,
            world=self.group.size,
            step=step,
            sha256=hashlib.sha256(data).hexdigest(),
            parameters=parameter_hash(trained.model),
            seen=(seen.loss, seen.correct, seen.images),
            python=_as_lists(random.getstate()),
        )
        write_whole(self._facts(step), json.dumps(asdict(facts)), durable=True)
        # What a run that began anew finds of later steps is of no use, and must not cost it what it writes.
        for old in sorted(other for other in self._steps() if other <= step)[: -self.kept]:
            self._facts(old).unlink(missing_ok=True)
            self._tensors(old).unlink(missing_ok=True)

    def agree(self, trained: Trained) -> int:
        """The last step of which all ranks have a whole checkpoint; 0: start from the beginning."""
        if not self.resume:
            return 0
        own = {step: facts.parameters for step, facts in self._whole(trained)}
        told = [json.loads(text) for text in self.group.tell_all("checkpoints", json.dumps(own))]
        for step in sorted(own, reverse=True):
            hashes = [other.get(str(step)) for other in told]
            if None not in hashes and (len(set(hashes)) == 1 or not self.must_agree):
                return step
        if any(told):
            have = "; ".join(f"rank {rank}: {', '.join(steps) or 'none'}" for rank, steps in enumerate(told))
            log.info("no checkpoint is common to all ranks (of steps: %s), so from the beginning", have)
        return 0

    def load(self, trained: Trained, step: int) -> None:
        """Put everything back in place."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path, facts = self._tensors(step), self._read(step)
        data = self._checked(facts, trained)
        try:
            spread(load(data), trained)
            random.setstate(_as_tuples(facts.python))
        except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, SafetensorError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SpecError(f"{path}: does not fit this run ({reason}). Remove it, or start anew.") from None
        trained.seen.loss, trained.seen.correct, trained.seen.images = facts.seen

    def _whole(self, trained: Trained) -> Iterator[tuple[int, Facts]]:
        """Checkpoints that are all there; a damaged one is as good as none."""
        for step in sorted(self._steps()):
            with contextlib.suppress(SpecError):
                facts = self._read(step)
                self._checked(facts, trained)
                yield step, facts

    def _checked(self, facts: Facts, trained: Trained) -> bytes:
        """The tensors as they were written; a file that is larger than any of this model's can be is not read."""
        path = self._tensors(facts.step)
        parameters = sum(p.numel() * p.element_size() for p in trained.model.parameters())
        data = read_bounded(path, MAX_SMALL + MAX_RATIO * parameters)
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise SpecError(f"{path}: is not what its checksum says. Remove it, and an earlier one is taken.")
        return data

    def _read(self, step: int) -> Facts:
        path = self._facts(step)
        try:
            values = json.loads(read_bounded(path, MAX_FACTS))
            facts = Facts(**values)
            right = (facts.rank, facts.world, facts.step, facts.schema)
            loss, correct, images = facts.seen
            texts = isinstance(facts.sha256, str) and isinstance(facts.parameters, str)
            if right != (self.group.rank, self.group.size, step, SCHEMA) or not texts:
                raise refuse("checkpoint", path.name, "is of another rank, run or version", "Remove it.")
            return Facts(**values | {"seen": (float(loss), int(correct), int(images))})
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise SpecError(f"{path}: damaged ({str(error).splitlines()[0][:200]}). Remove it.") from None

    def _steps(self) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("rank*.json")]
        return [int(match[2]) for match in names if match and int(match[1]) == self.group.rank]

    def _tensors(self, step: int) -> Path:
        return self.folder / f"rank{self.group.rank}-step{step}.safetensors"

    def _facts(self, step: int) -> Path:
        return self.folder / f"rank{self.group.rank}-step{step}.json"


def collect(trained: Trained) -> dict[str, Tensor]:
    """Everything as named tensors, copied; what is still under way is finished first."""
    trained.sync.flush()
    found = {f"sync.{key}": value for key, value in trained.sync.state().items()}
    found |= {f"model.{key}": value for key, value in trained.model.state_dict().items()}
    found |= {f"optimizer.{key}": value for key, value in trained.optimizer.state().items()}
    found |= {f"random.{key}": value for key, value in _random().items()}
    return {key: value.detach().clone().contiguous() for key, value in found.items()}


def spread(tensors: dict[str, Tensor], trained: Trained) -> None:
    """The other way; a name or shape that does not fit raises."""
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
    """In place: parameters may be views of a mode's buffers."""
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
