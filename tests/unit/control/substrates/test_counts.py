"""The counters of a node as the controller reads them."""

from __future__ import annotations

import subprocess

from testbed.control.substrates.base import NodeCounts
from testbed.control.substrates.counts import COMMAND, parse_counts

TEXT = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
  eth0: 5000 9 0 0 0 0 0 0 6000 8 0 0 0 0 0 0
Ip: Forwarding InReceives OutDiscards OutNoRoutes ReasmTimeout
Ip: 1 1200 0 3 0
Tcp: RtoAlgorithm
Tcp: 1
max 17
"""


def test_bytes_of_the_interface_and_what_the_kernel_refused() -> None:
    expected = NodeCounts(sent=6000, received=5000, unreachable=3, refused=17)
    assert parse_counts(TEXT, "eth0") == expected


def test_what_is_not_there_is_none() -> None:
    assert parse_counts("", "eth0") == NodeCounts()
    assert parse_counts(TEXT, "eth9").sent is None


def test_the_command_works_where_some_files_are_missing() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, check=True)
    assert parse_counts(done.stdout, "lo").sent is not None
