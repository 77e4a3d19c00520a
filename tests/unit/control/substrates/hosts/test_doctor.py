"""Which column shows what is wrong with a connection."""

from __future__ import annotations

import pytest

from testbed.control.substrates.hosts.doctor import connection_row
from testbed.control.substrates.hosts.ssh import Outcome
from testbed.spec.errors import AuthenticationFailed, HostFailed, KeyUnknown
from tests.support.scripted_hosts import ScriptedHost, silent


@pytest.mark.parametrize(
    ("error", "reachable", "key"),
    [
        (None, "yes", "known"),
        (KeyUnknown("node0: the key is not known"), "not accepted", "refused"),
        (AuthenticationFailed("node0: user ann"), "not accepted", "known"),
        (HostFailed("node0: no SSH connection; host key, not accepted"), "no", "-"),
    ],
)
def test_the_reason_why_a_host_does_not_answer(error: HostFailed | None, reachable: str, key: str) -> None:
    row = connection_row(Outcome(ScriptedHost(silent), error=error))
    assert (row.cells["reachable"], row.cells["key"], len(row.problems)) == (reachable, key, error is not None)
