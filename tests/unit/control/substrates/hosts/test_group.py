"""An action runs on all hosts, every outcome is kept, all failures are raised together."""

from __future__ import annotations

import pytest

from testbed.control.substrates.hosts.group import results_or_raise, run_on_all
from testbed.control.substrates.hosts.ssh import Host
from testbed.spec.errors import HostFailed, TestbedError
from tests.support.scripted_hosts import ScriptedHost, silent


def test_the_action_runs_on_all_hosts_and_all_failures_are_raised_together() -> None:
    hosts = [ScriptedHost(silent, name=f"node{k}") for k in range(4)]

    def call(host: Host) -> str:
        if host.name in ("node1", "node3"):
            raise HostFailed(f"{host}: is broken. Fix it")
        return host.name

    outcomes = run_on_all(hosts, call)
    assert [outcome.value for outcome in outcomes] == ["node0", None, "node2", None]
    with pytest.raises(TestbedError) as both:
        results_or_raise(outcomes)
    assert (
        str(both.value) == "node1: is broken. Fix it; node3: is broken. Fix it"
        and both.value.exit_code == HostFailed.exit_code
    )
    with pytest.raises(HostFailed, match=r"^node1"):
        results_or_raise(outcomes[:2])
    assert results_or_raise(outcomes[::2]) == ["node0", "node2"]


def test_an_unexpected_exception_on_one_host_is_an_outcome_too() -> None:
    outcomes = run_on_all([ScriptedHost(silent)], lambda host: 1 / 0)
    assert "node0: ZeroDivisionError" in str(outcomes[0].error)
