"""Replicas that differ: the message has all ranks' hashes and a way out, which is another one before the first step."""

from __future__ import annotations

import pytest
from torch import nn

from testbed.rank.group import Group, single_rank_group
from testbed.rank.replicas import compare
from testbed.spec.errors import ReplicasDiffer


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
