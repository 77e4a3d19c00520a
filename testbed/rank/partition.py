"""Which images a rank sees in which step of an epoch.

sampler   torch's DistributedSampler: one permutation an epoch, dealt out to the ranks like cards
fixed     one contiguous block a rank, in the same order every epoch

With equal shares, step k of all ranks together is the same set of images for every number of ranks (sampler), so runs
with 1, 2 and 4 ranks train on the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from testbed.spec.errors import refuse

Indices = NDArray[np.int64]
Kind = Literal["sampler", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A data set of `size` images cut into global batches of `batch` images.

    `shares`, images per step of each rank, are for uneven nodes; then an incomplete last global batch is dropped.
    Equal shares are the same as none: the last batch is kept, smaller.
    """

    size: int
    batch: int
    seed: int = 0
    kind: Kind = "sampler"
    shares: tuple[int, ...] | None = None

    def indices(self, rank: int, world: int, epoch: int) -> list[Indices]:
        """One array of image indices per step; the same number of steps on every rank."""
        self._check(world)
        if self._uneven is not None:
            return self._uneven_steps(self._uneven, rank, epoch)
        each = self.batch // world
        mine = self._fixed(rank, world) if self.kind == "fixed" else self._sampled(rank, world, epoch)
        return [mine[start : start + each] for start in range(0, len(mine), each)]

    def rows(self, rank: int, world: int, count: int) -> Indices:
        """Which rows of the global batch the first `count` images of this rank's step are."""
        if self._uneven is not None:
            return sum(self._uneven[:rank]) + np.arange(count)
        return rank + world * np.arange(count)

    def steps(self, world: int) -> int:
        """Steps per epoch."""
        self._check(world)
        if self._uneven is not None:
            return self.size // self.batch
        images = self.size // world * world if self.kind == "fixed" else self.size
        return -(-images // self.batch)

    @property
    def _uneven(self) -> tuple[int, ...] | None:
        return self.shares if self.shares is not None and len(set(self.shares)) > 1 else None

    def _check(self, world: int) -> None:
        """Batch and shares have passed RunSpec; only here is known how many images there are."""
        shares = self.shares or (self.batch // world,) * world
        assert len(shares) == world and sum(shares) == self.batch, f"{self} for {world} ranks"
        need = world if self._uneven is None else self.batch
        if self.size < need:
            raise refuse("subset", self.size, f"at least {need} images are needed for one step", "Use more images.")

    def _sampled(self, rank: int, world: int, epoch: int) -> Indices:
        """A permutation from the sampler's own generator; padded with its first images to divide by `world`."""
        sampler = DistributedSampler(range(self.size), world, rank, shuffle=True, seed=self.seed)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)  # without it every epoch would repeat the first one's order
        return np.fromiter(sampler, np.int64)

    def _fixed(self, rank: int, world: int) -> Indices:
        """Blocks of equal length, or ranks would disagree on the number of steps; a remainder is left out."""
        block = self.size // world
        return np.arange(rank * block, (rank + 1) * block)

    def _uneven_steps(self, shares: tuple[int, ...], rank: int, epoch: int) -> list[Indices]:
        """Sampler: consecutive pieces of each global batch. Fixed: one block a rank, as long as its share."""
        steps, before, own = self.size // self.batch, sum(shares[:rank]), shares[rank]
        if self.kind == "fixed":
            return list(np.arange(before * steps, (before + own) * steps).reshape(steps, own))
        batches = self._sampled(0, 1, epoch)[: steps * self.batch].reshape(steps, self.batch)
        return list(batches[:, before : before + own])
