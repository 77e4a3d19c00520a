"""Replicas that differ: the message has all ranks' hashes and a way out, which is another one before the first step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from testbed.rank.data import OwnData
from testbed.rank.group import Group, single_rank_group
from testbed.rank.replicas import compare, compare_data
from testbed.spec.errors import ReplicasDiffer, SpecError


class Apart(Group):
    """A group whose other rank has another model."""

    def all_gather_text(self, key: str, text: str) -> list[str]:
        return [text, "f" * 64]


@pytest.fixture
def apart() -> Group:
    return Apart(0, 2, single_rank_group().store, 1.0)


@pytest.mark.parametrize(
    ("step", "when", "way_out"),
    [(0, "before the first step", "the same image"), (8, "after step 8", r"fix its mean_ \(docs/modes\.md\)")],
)
def test_a_difference_names_the_ranks_hashes_and_what_to_do(apart: Group, step: int, when: str, way_out: str) -> None:
    with pytest.raises(ReplicasDiffer, match=rf"differ {when}: rank 0 \w{{12}}, rank 1 f{{12}}\. .*{way_out}"):
        compare(nn.Linear(1, 1), apart, step, must_agree=True)


def test_replicas_that_may_differ_are_recorded(apart: Group) -> None:
    assert compare(nn.Linear(1, 1), apart, 8, must_agree=False).agree is False


def ordered(labels: list[int]) -> OwnData:
    return OwnData("d.py:load", [(torch.ones(2), label) for label in labels], np.arange(len(labels)), (2,), 10)


@pytest.mark.parametrize("labels", [[1, 2, 4, 3], [1, 2, 3], [1, 2, 3, 5]])
def test_other_labels_of_a_users_data_on_another_rank_are_refused(labels: list[int]) -> None:
    """Each rank takes its share of the same order. With another order some samples would be in two shares."""

    class Other(Apart):
        def all_gather_text(self, key: str, text: str) -> list[str]:
            return [text, ordered(labels).fingerprint()]

    group = Other(0, 2, single_rank_group().store, 1.0)
    with pytest.raises(SpecError, match=r"data 'd\.py:load': has other labels, .* on rank 1 than on rank 0"):
        compare_data([ordered([1, 2, 3, 4])], group)


def test_equal_labels_are_accepted_with_samples_that_are_changed_at_random() -> None:
    class Noise:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.from_numpy(np.random.default_rng().random(2)), index % 7

    compare_data(
        [OwnData("d.py:load", Noise(), np.arange(100), (2,), 7)] * 2, Group(0, 1, single_rank_group().store, 1.0)
    )
    assert len({OwnData("d.py:load", Noise(), np.arange(100), (2,), 7).fingerprint() for _ in range(2)}) == 1
