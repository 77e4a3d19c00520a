from __future__ import annotations

import pytest

from testbed.results.collectives import Observed, group_of


@pytest.mark.parametrize(
    "observed",
    [
        Observed("all_reduce", "main.py:88"),
        Observed("all_reduce"),
        Observed("gather", "main.py:91", root=2),
        Observed("broadcast", "my script, v2.py:7", root=4, ranks=(4, 5)),
        Observed("broadcast", root=4, ranks=(4, 5)),
    ],
)
def test_a_name_is_read_back_as_it_was_written(observed: Observed) -> None:
    assert Observed.parse(str(observed)) == observed


def test_a_name_is_short_where_all_ranks_take_part_and_rank_0_is_the_root() -> None:
    assert str(Observed("scatter", "main.py:9")) == "scatter main.py:9"
    assert str(Observed("scatter", "main.py:9", 1, (1, 3))) == "scatter main.py:9, root 1, ranks 1 3"


def test_a_text_that_is_no_name_is_an_operation_of_its_own() -> None:
    assert Observed.parse("*** ?") == Observed("*** ?")


def test_a_group_of_all_ranks_in_their_order_is_empty() -> None:
    assert group_of([0, 1, 2], 3) == ()
    assert group_of([2, 0, 1], 3) == (2, 0, 1) and group_of([0, 2], 3) == (0, 2)
