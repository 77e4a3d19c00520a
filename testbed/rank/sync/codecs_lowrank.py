"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): each matrix travels as a product of two thin ones, P Q^T."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean
from testbed.rank.sync.codecs_seed import generator


@dataclass(frozen=True)
class Matrix:
    """A tensor of the buffer as rows x columns: the first dimension against all others."""

    begin: int
    rows: int
    columns: int
    rank: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


class LowRank:
    """One step of the power method a step, from where the last one ended; both factors go through any algorithm.

    What the product misses stays here and is added to the next gradient. Vectors, and matrices that would not get
    smaller, travel whole beside the P's.
    """

    def __init__(
        self, mean_: Mean, shapes: list[torch.Size], dtype: torch.dtype, rank: int, seed: tuple[int, ...]
    ) -> None:
        self.mean_ = mean_
        self.matrices, self.whole = _sort(shapes, rank)
        p_sizes = [m.rows * m.rank for m in self.matrices]
        q_sizes = [m.columns * m.rank for m in self.matrices]
        whole_sizes = [end - begin for begin, end in self.whole]
        self.first = torch.empty(sum(p_sizes) + sum(whole_sizes), dtype=dtype)  # all P's and what travels whole
        self.second = torch.empty(sum(q_sizes), dtype=dtype).normal_(generator=generator(*seed))  # all Q's, same start
        parts = list(self.first.split([*p_sizes, *whole_sizes]))
        self.p = [part.view(m.rows, m.rank) for part, m in zip(parts, self.matrices, strict=False)]
        self.q = [part.view(-1, m.rank) for part, m in zip(self.second.split(q_sizes), self.matrices, strict=True)]
        self.raw = parts[len(p_sizes) :]
        self.size = self.first.nbytes + self.second.nbytes
        length = sum(shape.numel() for shape in shapes)
        self.state = {"residual": torch.zeros(length, dtype=dtype), "q": self.second}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        residual = self.state["residual"]
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            gradient = m.of(buffer).add_(m.of(residual))
            m.of(residual).copy_(gradient)
            torch.mm(gradient, _orthogonal(q), out=p)
        for raw, (begin, end) in zip(self.raw, self.whole, strict=True):
            raw.copy_(buffer[begin:end])
        self.mean_(self.first, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(m.of(buffer).t(), p.copy_(_orthogonal(p)), out=q)
        self.mean_(self.second, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(p, q.t(), out=m.of(buffer))
            m.of(residual).sub_(m.of(buffer))
        for raw, (begin, end) in zip(self.raw, self.whole, strict=True):
            buffer[begin:end].copy_(raw)


def _orthogonal(tall: Tensor) -> Tensor:
    """An orthonormal basis of the columns; the same bits wherever the input has the same bits."""
    return torch.linalg.qr(tall).Q


def _sort(shapes: list[torch.Size], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """Which tensors travel as products, and where those lie that travel whole."""
    matrices: list[Matrix] = []
    whole: list[tuple[int, int]] = []
    begin = 0
    for shape in shapes:
        length = shape.numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = length // rows if rows else 0
        if (rows + columns) * min(rank, rows, columns) < length:
            matrices.append(Matrix(begin, rows, columns, min(rank, rows, columns)))
        else:
            whole.append((begin, begin + length))
        begin += length
    return matrices, whole
