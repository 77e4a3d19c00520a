"""Replicas agree: hash the parameters, compare through the store, and treat BatchNorm's buffers as the run asks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import allreduce_mean_, broadcast_
from testbed.results.records import Hash
from testbed.spec.errors import ReplicasDiffer

SAME_START = "Nothing was sent yet: give all nodes the same image, or the same versions of testbed and torch."
MEND = "The mode does not keep replicas equal. If it is your own, mend its mean_ (docs/modes.md); else use another."


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def compare(model: nn.Module, group: Group, step: int, must_agree: bool) -> Hash:
    """Everybody's hash against everybody's; a difference raises where there must be none."""
    own = parameter_hash(model)
    hashes = group.tell_all(f"hash/{step}", own)
    agree = len(set(hashes)) == 1
    if must_agree and not agree:
        short = ", ".join(f"rank {rank} {value[:12]}" for rank, value in enumerate(hashes))
        raise ReplicasDiffer(f"parameters differ before step {step}: {short}. {MEND if step else SAME_START}")
    return Hash(step=step, parameters=own, agree=agree)


def share_statistics(model: nn.Module, group: Group, how: str) -> None:
    """Give all ranks the BatchNorm statistics of rank 0 (`broadcast`) or of the mean (`average`); `local` leaves them.

    Training never reads them, so doing it when somebody is about to look gives what doing it in every step would:
    a running average of averages is the average of running averages.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if group.size == 1 or not buffers or how not in ("broadcast", "average"):
        return
    flat = torch.cat([b.reshape(-1) for b in buffers])
    with group.carrying("buffers"):
        (broadcast_ if how == "broadcast" else allreduce_mean_)(flat, group)
    _unpack(flat, buffers)


def _unpack(flat: Tensor, buffers: list[Tensor]) -> None:
    for piece, buffer in zip(flat.split([b.numel() for b in buffers]), buffers, strict=True):
        buffer.copy_(piece.view_as(buffer))
