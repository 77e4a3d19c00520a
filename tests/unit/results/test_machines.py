"""What other processes used, from the processor times that ranks recorded; and the footnote about it."""

from __future__ import annotations

from typing import Any

from testbed.results.machines import MachineLoad, busy_note, machine_loads
from testbed.results.records import End, Record, Start

HERE, THERE = "boot-a", "boot-b"


def rank(
    machine: str, busy: float, own: float, measured: float | None = 10.0, cores: int = 2, **values: Any
) -> list[Record]:
    """The records of a rank that measured so many seconds of processor time within `measured` seconds."""
    facts: dict[str, Any] = {"parameters": 1, "gradient_bytes": 4, "tensors": 1, "deadline": 60.0, "counter": "none"}
    start = Start(rank=0, world=1, unix=0.0, environment={"cores": cores, "load": 0.5} | values, **facts)
    counted: dict[str, Any] = {"machine": machine, "machine_cpu": busy, "own_cpu": own, "measured": measured}
    return [start, End(steps=4, seconds=10.0, sent=None, received=None, **counted)]


def test_what_the_ranks_of_a_machine_did_not_use_others_used() -> None:
    (found,) = machine_loads([rank(HERE, 18.0, 4.0), rank(HERE, 18.0, 2.0)])
    assert found == MachineLoad(ranks=[0, 1], cores=2, others=1.2, load_at_start=0.5)
    assert found.is_busy and found.limit == 0.2


def test_every_machine_has_its_own_others() -> None:
    first, second = machine_loads([rank(HERE, 4.0, 4.0), rank(THERE, 9.0, 4.0, cores=8)])
    assert (first.ranks, first.others, first.is_busy) == ([0], 0.0, False)
    assert (second.ranks, second.others, second.limit, second.is_busy) == ([1], 0.5, 0.8, False)


def test_intervals_of_different_length_are_compared_as_rates() -> None:
    (found,) = machine_loads([rank(HERE, 15.0, 5.0, measured=10.0), rank(HERE, 16.5, 5.5, measured=11.0)])
    assert found.others == 0.5


def test_a_rank_whose_time_includes_interrupts_gives_no_negative_others() -> None:
    (found,) = machine_loads([rank(HERE, 4.0, 4.3)])
    assert found.others == 0.0


def test_nothing_is_said_without_the_records_of_all_ranks() -> None:
    """The missing rank may have run on the same machine."""
    assert machine_loads([rank(HERE, 18.0, 4.0), []]) == []
    assert machine_loads([rank(HERE, 18.0, 4.0), rank("", 18.0, 4.0)]) == []


def test_nothing_is_said_about_a_time_too_short_for_the_kernels_ticks() -> None:
    for short in (0.5, None):
        (found,) = machine_loads([rank(HERE, 0.9, 0.1, measured=10.0), rank(HERE, 0.9, 0.1, measured=short)])
        assert found.others is None and not found.is_busy and busy_note([[found]]) == ""


def test_a_quiet_machine_has_no_footnote() -> None:
    quiet = machine_loads([rank(HERE, 18.0, 9.0), rank(HERE, 18.0, 8.0)])
    assert quiet[0].others == 0.1 and busy_note([quiet]) == "" and busy_note([]) == ""


def test_the_footnote_says_the_value_the_limit_and_the_way_out() -> None:
    busy = machine_loads([rank(HERE, 18.0, 6.0)])
    assert busy_note([busy]) == "other processes used 1.20 of 2 cores during the steps; limit 0.2; run it alone"


def test_the_footnote_of_several_runs_has_the_highest_value() -> None:
    runs = [machine_loads([rank(HERE, 18.0, own)]) for own in (6.0, 4.0, 17.0)]
    assert busy_note(runs).startswith("other processes used up to 1.40 of 2 cores during the steps; limit 0.2")


def test_the_footnote_names_the_ranks_of_the_machine_if_there_are_several() -> None:
    hosts = machine_loads([rank(HERE, 4.0, 4.0), rank(THERE, 9.0, 4.0), rank(THERE, 9.0, 0.5)])
    assert "0.45 of 2 cores on the machine of ranks 1, 2 during" in busy_note([hosts])
