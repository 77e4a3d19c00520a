"""A test that measures waits until other work on the machine is little, but not for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.support import quiet
from tests.support.quiet import QuietMachine, busy_shares


def given(*shares: float) -> tuple[Callable[[float], Iterator[float]], list[float]]:
    """Samples with these shares, the last one again and again; and those that were taken."""
    taken: list[float] = []

    def sample(sample_s: float) -> Iterator[float]:
        while True:
            taken.append(shares[min(len(taken), len(shares) - 1)])
            yield taken[-1]

    return sample, taken


def test_it_waits_until_a_sample_is_quiet() -> None:
    shares, taken = given(0.9, 0.5, 0.1)
    assert QuietMachine(shares).wait() == 0.1 and taken == [0.9, 0.5, 0.1]


def test_on_a_quiet_machine_it_takes_one_sample_however_often() -> None:
    shares, taken = given(0.1)
    machine = QuietMachine(shares, budget_s=quiet.SAMPLE_S)
    assert [machine.wait() for _ in range(1000)] == [0.1] * 1000 and len(taken) == 1000


def test_beside_a_busy_core_each_wait_has_a_deadline_and_all_have_a_budget() -> None:
    shares, taken = given(0.5)
    machine = QuietMachine(shares, budget_s=2.5 * quiet.DEADLINE_S)
    assert [machine.wait() for _ in range(5)] == [0.5, 0.5, 0.5, None, None]
    assert len(taken) == 2.5 * quiet.DEADLINE_S / quiet.SAMPLE_S + 3


def test_the_busy_share_is_a_share() -> None:
    samples = busy_shares(0.05)
    assert all(0 <= next(samples) <= 1 for _ in range(2))
