"""Run a function on all hosts at the same time, keep every outcome, raise once with all names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from testbed.control.substrates.hosts.ssh import Host
from testbed.spec.errors import TestbedError, Unavailable
from testbed.spec.inventory import HostNode

T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """The result of one host: a value or an error."""

    host: Host
    value: T | None = None
    error: TestbedError | None = None


def run_on_all(hosts: Sequence[Host], call: Callable[[Host], T]) -> list[Outcome[T]]:
    """Call a function for all hosts in parallel; in daemon threads, so that Ctrl-C does not wait for a slow host."""
    outcomes: list[Outcome[T]] = [Outcome(host) for host in hosts]

    def work(outcome: Outcome[T]) -> None:
        try:
            outcome.value = call(outcome.host)
        except TestbedError as error:
            outcome.error = error
        except Exception as error:  # unexpected, so a bug; the outcomes of the other hosts are kept
            outcome.error = TestbedError(f"{outcome.host}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(outcome,), daemon=True) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def results_or_raise(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """Return the values of all hosts, or raise one error with all failures. A single error is raised unchanged."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        unavailable = any(error.exit_code == Unavailable.exit_code for error in errors)
        raise (Unavailable if unavailable else TestbedError)("; ".join(str(error).rstrip(".") for error in errors))
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


@contextmanager
def connected(nodes: Sequence[HostNode], accept_new: bool) -> Iterator[list[Outcome[Host]]]:
    """Connect to all hosts and close the connections at the end; a host that cannot be reached is an error outcome."""
    hosts = [Host(node, accept_new) for node in nodes]

    def connect(host: Host) -> Host:
        host.open()
        return host

    try:
        yield run_on_all(hosts, connect)
    finally:
        for host in hosts:
            host.close()
