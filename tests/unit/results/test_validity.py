"""What other processes used, from the processor times that ranks recorded; and the footnote about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.results.records import End, Record, Start, Step
from testbed.results.validity import (
    MAX_USE,
    MachineLoad,
    busy_note,
    fastest_rate,
    impossible,
    machine_loads,
    overloaded,
)
from testbed.spec.run import RunSpec

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
    assert found == MachineLoad(ranks=[0, 1], cores=2, others=1.2, own=0.6, load_at_start=0.5)
    assert found.is_busy and found.limit == 0.2


def test_ranks_with_emulated_compute_must_leave_a_quarter_of_the_cores() -> None:
    (calm,) = machine_loads([rank(HERE, 18.0, 7.0), rank(HERE, 18.0, 7.0)])
    (full,) = machine_loads([rank(HERE, 18.0, 8.0), rank(HERE, 18.0, 8.0)])
    assert overloaded([calm]) == ""
    assert "used 1.60 of 2 cores, more than 75 %" in overloaded([calm, full])


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


MBIT = 10**6
S = 1_000_000  # bytes of the gradient
STEPS = 40


def spec_of(mode: str = "ring", **values: Any) -> RunSpec:
    small = {"mode": mode, "model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "nodes": 4, "steps": STEPS}
    return RunSpec.load(small | {"link": {"rate": "50mbit"}} | values, "test")


def records(
    rank: int,
    seconds: float,
    sent: int,
    received: int = 0,
    steps: int = STEPS,
    counter: str = "interface eth0",
    **values: Any,
) -> list[Record]:
    """A rank whose steps take `seconds` and send `sent` bytes each."""
    facts: dict[str, Any] = {"parameters": S // 4, "gradient_bytes": S, "tensors": 2, "deadline": 60.0, "unix": 0.0}
    start = Start(rank=rank, world=4, counter=counter, **facts)
    times = dict.fromkeys(("data", "forward", "backward", "sync", "update"), 0.0)
    return [start, *_steps(seconds, sent, received, steps, {"epoch": 0, "loss": 1.0, "images": 2} | times | values)]


def _steps(seconds: float, sent: int, received: int, count: int, values: dict[str, Any]) -> list[Record]:
    return [
        Step(step=k, at=k * seconds, total=seconds, sent=(k + 1) * sent, received=(k + 1) * received, **values)
        for k in range(count)
    ]


def all_ranks(seconds: float, sent: int, **values: Any) -> list[list[Record]]:
    return [records(rank, seconds, sent, **values) for rank in range(4)]


def test_a_link_that_carried_more_than_its_rate_is_named_with_the_arithmetic() -> None:
    ranks = all_ranks(1.0, 1_000_000)  # 8 Mbit/s
    ranks[2] = records(2, 0.01, 1_500_000)
    reason = impossible(spec_of(), ranks)
    assert reason == (
        "rank 2 sent 58.5 MB during 39 steps in 0.39 s: at 50mbit that takes at least 9.36 s, "
        "so 2400 % of the link was used, and at most 103 % is possible"
    )


def test_a_step_faster_than_its_bytes_allow_is_found_without_counters() -> None:
    """Rank 0 of a gather sends 3 S after it has received the last S; theory decides."""
    ranks = [records(0, 0.05, 0)] + [records(rank, 1.0, 0) for rank in (1, 2, 3)]
    reason = impossible(spec_of("gather"), ranks)
    assert "rank 0 did 39 steps in 1.95 s, and gather must receive and send in turn 152 MB during them" in reason
    assert "at 50mbit that takes at least 24.3 s" in reason


@pytest.mark.parametrize(("mode", "load"), [("gather", 6), ("gather/bucket:64KiB", 6), ("tree", 4)])
def test_a_run_at_half_its_bound_is_found_and_one_a_little_below_it_is_not(mode: str, load: int) -> None:
    """Sockets and queues hold what the root has sent, so that a part of two rounds overlaps: 7 % were measured."""
    once = load * S * 8 / (50 * MBIT)
    assert "must receive and send in turn" in impossible(spec_of(mode), all_ranks(once / 2, 0))
    assert impossible(spec_of(mode), all_ranks(0.9 * once, 0)) == ""


@pytest.mark.parametrize("mode", ["gather/bucket:64KiB/overlap", "tree/bucket:64KiB/overlap"])
def test_with_overlap_a_root_receives_while_it_sends(mode: str) -> None:
    assert impossible(spec_of(mode), all_ranks(3 * S * 8 / (50 * MBIT), 0)) == ""


@pytest.mark.parametrize("use", [0.5, 0.99, 1.02])
def test_a_link_in_full_use_is_possible(use: float) -> None:
    sent = round(50 * MBIT / 8 * use)
    assert impossible(spec_of(), all_ranks(1.0, sent)) == ""


def test_a_few_percent_too_much_are_found_over_many_steps() -> None:
    sent = round(50 * MBIT / 8 * 1.05)
    assert impossible(spec_of(), all_ranks(1.0, sent)) != ""
    short = all_ranks(0.01, round(sent / 100), steps=3)
    assert impossible(spec_of("ring/fp16"), short) == ""  # too short to tell: a burst


RING = 1.5 * S  # bytes that a rank sends
LEGAL = {
    "no overlap": ("ring", {}, 1.0, RING),
    "overlap at the rate of the wire": ("ring/bucket:2MiB/overlap", {}, RING * 8 / (50 * MBIT), RING),
    "a pipeline that carries work over steps": ("ring/bucket:2MiB/pipeline", {}, RING * 8 / (50 * MBIT), RING),
    "every:4 sends a quarter": ("ring/every:4", {}, RING * 8 / (50 * MBIT) / 4, RING / 4),
    "a codec sends half": ("ring/fp16", {}, RING * 8 / (50 * MBIT) / 2, RING / 2),
    "a codec sends one percent": ("direct/topk:0.01", {}, 0.01, 0.02 * S),
    "nothing is sent": ("none", {}, 0.001, 0),
    "one node": ("single", {}, 0.001, 0),
    "an unshaped network": ("ring", {"link": {}}, 0.001, RING),
    "one fast link": ("ring", {"overrides": {f"node{k}": {"link": {"rate": "1gbit"}} for k in range(4)}}, 0.02, RING),
    "a fault that raises the rate": (
        "ring",
        {"faults": [f"rate:rank{k}@step1=1gbit" for k in range(4)]},
        0.02,
        RING,
    ),
    "a fault that lowers the rate": ("ring", {"faults": ["rate:rank1@step3+1s=1mbit"]}, 0.25, RING),
}


@pytest.mark.parametrize(("mode", "values", "seconds", "sent"), LEGAL.values(), ids=LEGAL.keys())
def test_legal_runs_are_possible(mode: str, values: dict[str, Any], seconds: float, sent: float) -> None:
    assert impossible(spec_of(mode, **values), all_ranks(seconds, round(sent))) == ""


def test_each_attempt_counts_its_own_bytes() -> None:
    """A restarted rank counts from 0, and its earlier attempt may have run at another time."""
    ranks = all_ranks(1.0, 1_000_000)
    early = [record for record in records(0, 1.0, 5_000_000, steps=10, attempt=1) if isinstance(record, Step)]
    ranks[0] = [ranks[0][0], *early, *ranks[0][11:]]
    assert impossible(spec_of(), ranks) == ""
    fast = [record for record in records(0, 0.1, 5_000_000, steps=10, attempt=1) if isinstance(record, Step)]
    ranks[0] = [ranks[0][0], *fast, *ranks[0][11:]]
    assert "rank 0 sent 45 MB during 9 steps" in impossible(spec_of(), ranks)


def test_the_rate_of_a_node_is_its_own_and_the_highest_of_its_faults() -> None:
    spec = spec_of(overrides={"node1": {"link": {"rate": "10mbit"}}}, faults=["rate:rank2@step3=1gbit"])
    assert [fastest_rate(spec, rank) for rank in range(4)] == [50 * MBIT, 10 * MBIT, 1000 * MBIT, 50 * MBIT]
    assert MAX_USE == 1.03


def test_without_records_nothing_is_said() -> None:
    assert impossible(spec_of(), [[], [], [], []]) == ""


def test_counts_of_sockets_are_not_held_against_a_link() -> None:
    """They include what the sockets buffer; theory still holds."""
    assert impossible(spec_of("ring/fp16"), all_ranks(0.01, 1_500_000, counter="tcp sockets")) == ""
    assert "ring must" in impossible(spec_of("ring"), all_ranks(0.01, 1_500_000, counter="tcp sockets"))


def script_spec(**values: Any) -> RunSpec:
    script = {"argv": ["python", "main.py"], "folder": "/home/user"}
    return RunSpec.load({"mode": "script", "script": script, "nodes": 4, "link": {"rate": "50mbit"}} | values, "test")


def observed(seconds: float, *names: str) -> list[list[Record]]:
    """Steps of a script at all ranks that count nothing at their interface; each makes these collectives of S bytes."""
    comm = [(name, 0.1 * k, 0.05, S) for k, name in enumerate(names)]
    made = [records(rank, seconds, 0, counter="tcp sockets") for rank in range(4)]
    return [[replace(r, comm=comm) if isinstance(r, Step) else r for r in rows] for rows in made]


def test_a_script_faster_than_its_collectives_allow_is_found() -> None:
    # a ring all-reduce of S at 50 Mbit/s takes 1.5 S x 8 / 50e6 = 0.24 s
    reason = impossible(script_spec(), observed(0.2, "all_reduce main.py:9"))
    assert reason.startswith("rank 0 did 39 steps") and "main.py by its collectives must send" in reason
    assert impossible(script_spec(), observed(0.25, "all_reduce main.py:9")) == ""


def test_the_root_of_a_script_s_gather_must_receive_all_parts() -> None:
    # (N-1) S arrive at rank 0 in every step: 0.48 s
    assert "must receive" in impossible(script_spec(), observed(0.4, "gather main.py:9"))
    assert impossible(script_spec(), observed(0.5, "gather main.py:9", "scatter main.py:12")) == ""


def test_a_script_whose_collectives_are_unknown_is_held_against_its_counter_only() -> None:
    assert impossible(script_spec(), observed(0.01, "strange main.py:9")) == ""
    assert "sent 40" in impossible(script_spec(), [records(0, 0.01, 1_050_000)])


RACKED = {"topology": {"racks": [[0, 1], [2, 3]], "uplink": "10mbit"}}


def test_a_run_faster_than_its_uplink_is_found_although_its_links_allow_it() -> None:
    """Each rack must send 1.5 MB a step through 10 Mbit/s: 1.2 s."""
    assert impossible(spec_of(**RACKED), all_ranks(1.25, 0)) == ""
    reason = impossible(spec_of(**RACKED), all_ranks(0.6, 0))
    assert "ring must send 57 MB through the uplink of rack 0 during them: at 10mbit" in reason
    assert impossible(spec_of(), all_ranks(0.6, 0)) == ""


def test_a_node_that_is_alone_in_its_rack_has_the_rate_of_the_slower_of_link_and_uplink() -> None:
    alone = {"topology": {"racks": [[0], [1, 2, 3]], "uplink": "10mbit"}}
    assert [fastest_rate(spec_of(**alone), rank) for rank in range(4)] == [10 * MBIT, *[50 * MBIT] * 3]
