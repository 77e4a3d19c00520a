"""Namespaces without root: what is refused before anything is created. tests/net has the rest."""

from __future__ import annotations

import pytest

from testbed.control.substrates import netns
from testbed.spec.errors import Unavailable


def test_more_nodes_than_addresses_are_refused_with_a_way_out() -> None:
    netns.check_count(240)
    with pytest.raises(Unavailable, match=r"241 nodes, .*\. Use --nodes 240 or fewer$"):
        netns.check_count(241)
