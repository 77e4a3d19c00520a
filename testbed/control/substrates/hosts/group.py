"""Ask every host at the same time, keep every outcome, raise once with all names."""

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
    """What one host gave: a value or an error."""

    host: Host
    value: T | None = None
    error: TestbedError | None = None


def each(hosts: Sequence[Host], call: Callable[[Host], T]) -> list[Outcome[T]]:
    """`call` on all hosts in parallel; daemon threads, so that Ctrl-C need not wait for a slow one."""
    outcomes: list[Outcome[T]] = [Outcome(host) for host in hosts]

    def work(outcome: Outcome[T]) -> None:
        try:
            outcome.value = call(outcome.host)
        except TestbedError as error:
            outcome.error = error
        except Exception as error:  # ours to mend, but the other hosts' outcomes count all the same
            outcome.error = TestbedError(f"{outcome.host}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(outcome,), daemon=True) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """Everybody's value, or one error that tells all failures."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise _together(errors)
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


def _together(errors: Sequence[TestbedError]) -> TestbedError:
    """One error stays what it is; of several the first gives the kind."""
    if len(errors) == 1:
        return errors[0]
    kind = Unavailable if any(error.exit_code == Unavailable.exit_code for error in errors) else TestbedError
    return kind("; ".join(str(error).rstrip(".") for error in errors))


@contextmanager
def connected(nodes: Sequence[HostNode], accept_new: bool) -> Iterator[list[Outcome[Host]]]:
    """Connections to all hosts, as outcomes: one that cannot be reached is told, not fatal."""
    hosts = [Host(node, accept_new) for node in nodes]

    def reach(host: Host) -> Host:
        host.open()
        return host

    try:
        yield each(hosts, reach)
    finally:
        for host in hosts:
            host.close()
