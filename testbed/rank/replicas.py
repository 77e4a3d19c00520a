"""Equal replicas: compare parameters and a user's data on all ranks, share BatchNorm statistics as the spec says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from testbed.rank.data import Dataset, OwnData
from testbed.rank.group import Group
from testbed.rank.sync.algorithms import allreduce_mean_, broadcast_
from testbed.results.records import Hash
from testbed.spec.errors import ReplicasDiffer, refuse

SAME_START = "Nothing was sent yet: give all nodes the same image, or the same versions of testbed and torch."
WRONG_MODE = "The mode does not keep replicas equal. If it is your own, fix its mean_ (docs/modes.md)."


def parameter_hash(model: nn.Module) -> str:
    """Return the SHA-256 of the bytes of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.detach().contiguous().reshape(-1)
        digest.update(whole.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def compare(model: nn.Module, group: Group, step: int, must_agree: bool) -> Hash:
    """Compare the hashes of all ranks after `step` steps and return the record.

    Raises ReplicasDiffer if the hashes differ and `must_agree` is true.
    """
    own = parameter_hash(model)
    hashes = group.all_gather_text(f"hash/{step}", own)
    agree = len(set(hashes)) == 1
    if must_agree and not agree:
        short = ", ".join(f"rank {rank} {value[:12]}" for rank, value in enumerate(hashes))
        when, way_out = (f"after step {step}", WRONG_MODE) if step else ("before the first step", SAME_START)
        raise ReplicasDiffer(f"parameters differ {when}: {short}. {way_out}")
    return Hash(step=step, parameters=own, agree=agree)


def compare_data(datasets: Iterable[Dataset], group: Group) -> None:
    """Compare the user's own data sets on all ranks. The testbed's are compared by checksum where they are fetched.

    Raises SpecError if they differ: a step's global batch would have some samples several times and others never.
    """
    own = [each for each in datasets if isinstance(each, OwnData)]
    if not own:
        return
    found = group.all_gather_text("data", " ".join(each.fingerprint() for each in own))
    if others := [str(rank) for rank, text in enumerate(found) if text != found[0]]:
        rule = f"has other labels, or another order of them, on rank {', '.join(others)} than on rank 0"
        raise refuse("data", own[0].name, rule, "Give its random generators a seed, and read files in sorted order.")


def share_statistics(model: nn.Module, group: Group, how: str) -> None:
    """Give all ranks the BatchNorm statistics of rank 0 (`broadcast`) or their mean (`average`).

    Training does not read these statistics, so it is enough to share them before a test. The result is the same as if
    they were shared in every step: a running average of averages is the average of running averages.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if group.size == 1 or not buffers or how not in ("broadcast", "average"):
        return
    flat = torch.cat([b.reshape(-1) for b in buffers])
    with group.payload_kind("buffers"):
        (broadcast_ if how == "broadcast" else allreduce_mean_)(flat, group)
    _unpack(flat, buffers)


def _unpack(flat: Tensor, buffers: list[Tensor]) -> None:
    for values, buffer in zip(flat.split([b.numel() for b in buffers]), buffers, strict=True):
        buffer.copy_(values.view_as(buffer))
