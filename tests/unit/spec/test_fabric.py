"""Fabric: what several nodes that send at once can reach through links and uplinks."""

from __future__ import annotations

import pytest

from testbed.spec.fabric import Fabric, rack_numbers

RACKS = (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("rates", "senders", "limit"),
    [
        ((100, 30, 30), [1, 2], 60),
        ((50, 30, 30), [1, 2], 50),
        ((None, 30), [1], 30),
        ((50, None, 30), [1, 2], 50),
        ((None, None), [1], None),
    ],
)
def test_the_limit_is_the_receiver_or_all_senders_together(
    rates: tuple[int | None, ...], senders: list[int], limit: int | None
) -> None:
    assert Fabric.of(rates).limit([(src, 0) for src in senders]) == limit


def test_a_link_across_racks_is_limited_by_the_link_and_the_uplink() -> None:
    assert Fabric.of([100] * 4, RACKS, 40).limit([(0, 1)]) == 100
    assert Fabric.of([100] * 4, RACKS, 40).limit([(0, 2)]) == 40
    assert Fabric.of([100] * 4, RACKS, 400).limit([(0, 2)]) == 100
    assert Fabric.of([None] * 4, RACKS, 40).limit([(0, 2)]) == 40


def test_the_fan_in_of_a_node_takes_what_the_uplink_leaves() -> None:
    fabric = Fabric.of([100] * 4, RACKS, 40)
    assert fabric.limit([(2, 0), (3, 0)]) == 40
    assert fabric.limit([(1, 0), (2, 0), (3, 0)]) == 100
    assert Fabric.of([300, 100, 100, 100], RACKS, 40).limit([(1, 0), (2, 0), (3, 0)]) == 140


def test_all_nodes_of_a_rack_share_its_uplink() -> None:
    across = [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert Fabric.of([100] * 4, RACKS, 40).limit(across) == 40
    assert Fabric.of([10] * 4, RACKS, 40).limit(across) == 20
    assert Fabric.of([100, 100, 10, 10], RACKS, 40).limit(across) == 20


def test_several_racks_send_into_one_through_its_own_uplink() -> None:
    fabric = Fabric.of([100] * 6, (0, 0, 1, 1, 2, 2), 40)
    assert fabric.limit([(src, dst) for src in (2, 3, 4, 5) for dst in (0, 1)]) == 40
    assert fabric.limit([(src, dst) for src in (0, 1) for dst in (2, 3, 4, 5)]) == 40


def test_an_uplink_without_a_rate_limits_nothing() -> None:
    assert Fabric.of([100] * 4, RACKS, None).limit([(0, 2)]) == 100
    assert not Fabric.of([100] * 4, RACKS, None).crosses(0, 2)


def test_ranks_know_their_rack() -> None:
    assert rack_numbers(((0, 2), (1, 3)), 4) == (0, 1, 0, 1) and rack_numbers((), 2) == (0, 0)
