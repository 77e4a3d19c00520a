"""Every kind of demand over built records: met, not met, not proven."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.control.grading.demands import JUDGES, MET, NOT_MET, NOT_PROVEN, Verdict, judge
from testbed.control.grading.evidence import Node, Outside, PartEvidence
from testbed.results.observations import Batch
from testbed.spec.grading import DEMANDS, OUTSIDE, RECORDS, Assignment
from tests.support.submissions import GRADIENT_BYTES, LOCAL, MEAN, STEPS, WORLD, evidence

SUM = [[WORLD * value for value in MEAN]] * WORLD
PARTLY = [MEAN, *LOCAL[1:]]
UNCOUNTED = Outside(seconds=10.0, nodes=[Node(code=0)] * WORLD)


def verdict(found: PartEvidence | None, *others: PartEvidence, **demand: Any) -> Verdict:
    """The verdict on one demand of part 2b; `others` are further parts."""
    names = ["2b", *(each.part.name for each in others)]
    shape = {"file": "a.py", "argv": ["python", "a.py"], "nodes": WORLD, "steps": STEPS}
    parts = [{"name": name, **shape, "demands": [demand | {"points": 3}]} for name in dict.fromkeys(names)]
    for each in parts[1:]:
        each["demands"] = [{"kind": "runs", "points": 1}]
    keys = {"name": "a", "title": "t", "parameters": GRADIENT_BYTES // 4, "parts": parts}
    evidences = {each.part.name: each for each in (found, *others) if each is not None}
    return judge(Assignment.load(keys, "a.toml"), evidences)[0]


BANDS = {"rank0": [1.2, 1.6], "others": [1.2, 1.6]}
ALL_REDUCE = {"required": ["all_reduce"], "forbidden": ["gather", "DistributedDataParallel"]}
CASES: list[tuple[str, dict[str, Any], PartEvidence, str, str]] = [
    ("runs", {}, evidence(), MET, "code 0 on 3 nodes"),
    ("runs", {}, evidence(codes=(0, 1, 0)), NOT_MET, "exit codes [0, 1, 0]"),
    ("runs", {}, evidence(steps=4), NOT_MET, "ended after 4 of 10 steps"),
    ("collectives", ALL_REDUCE, evidence(), MET, "10 x all_reduce"),
    ("collectives", ALL_REDUCE, evidence(operations=("all_reduce", "gather")), NOT_PROVEN, "counted"),
    ("collectives", ALL_REDUCE, evidence(wrappers=("DistributedDataParallel",)), NOT_MET, "uses DistributedDataPar"),
    ("collectives", {"required": ["scatter"]}, evidence(), NOT_MET, "rank 0 never calls scatter"),
    ("collectives", ALL_REDUCE, evidence(calling=(0, 1, 2)), NOT_MET, "all_reduce in 7 of 10 steps, first in step 4"),
    ("collectives", ALL_REDUCE, evidence(calling=tuple(range(1, 10))), MET, "10 x all_reduce"),  # after the update
    ("collectives", {"forbidden": ["all_reduce"]}, evidence(), NOT_MET, "uses all_reduce (a.py:9)"),
    ("gradients", {}, evidence(), MET, "factor 1.000000"),
    ("gradients", {}, evidence(given=SUM), NOT_MET, "the sum over all ranks"),
    ("gradients", {}, evidence(given=LOCAL), NOT_MET, "own gradients"),
    ("gradients", {}, evidence(given=PARTLY), NOT_MET, "on some ranks"),
    ("gradients", {}, evidence(given_last=SUM), NOT_MET, "the sum over all ranks, not their mean (factor 3.000000"),
    ("gradients", {}, evidence(given_last=SUM), NOT_MET, "at update 7, 1 of 4 samples"),
    ("gradients", {}, evidence(given_last=[[]] * WORLD), MET, "3 samples"),
    ("gradients", {}, evidence(given=[[]] * WORLD), NOT_PROVEN, "not seen"),
    ("replicas", {}, evidence(), MET, "equal at 11 moments"),
    ("replicas", {}, evidence(hashes=("x", "x", "y")), NOT_MET, "parameters differ at the start"),
    ("replicas", {}, evidence(steps=0), NOT_PROVEN, "no hashes"),
    ("data", {}, evidence(), MET, "no images in common in 10 steps"),
    ("data", {}, evidence(batches=("a", "b", "a")), NOT_MET, "rank 2 at step 1 and rank 0 at step 1"),
    ("data", {}, evidence(steps=0), NOT_PROVEN, "no hashes"),
    ("batch", {"images": 48}, evidence(), MET, "48 images in each of 10 steps"),
    ("batch", {"images": 48}, evidence(images=144), NOT_MET, "step 1 has 144 images"),
    ("batch", {"images": 48}, evidence(images=0), NOT_PROVEN, "uses no DataLoader"),
    ("bytes", BANDS, evidence(), MET, "by rank 1.33, 1.33, 1.33"),
    ("bytes", BANDS, evidence(gradient_bytes=2 * GRADIENT_BYTES), NOT_MET, "rank 0 sends 2.67 gradients"),
    ("bytes", BANDS, replace(evidence(steps=0), outside=UNCOUNTED), NOT_PROVEN, "were not counted"),
]


@pytest.mark.parametrize(("kind", "keys", "found", "expected", "reason"), CASES)
def test_a_demand_on_one_part(kind: str, keys: dict[str, Any], found: PartEvidence, expected: str, reason: str) -> None:
    given = verdict(found, kind=kind, **keys)
    assert given.verdict == expected and reason in given.reason, given
    assert given.points == (3 if expected == MET else 0) and given.of == 3
    assert given.evidence == DEMANDS[kind].rests_on or (kind == "bytes" and not found.outside.counted)


LOSS = {"kind": "loss", "part": "1"}
SPEED = {"kind": "speed", "part": "2a"}


def test_the_first_loss_is_compared_with_that_of_another_part() -> None:
    assert verdict(evidence(), evidence(name="1"), **LOSS).verdict == MET
    given = verdict(evidence(loss=2.6), evidence(name="1"), **LOSS)
    assert given.verdict == NOT_MET and given.reason == "2.6000 here, 2.5000 in part 1"
    failed = replace(evidence(name="1", steps=0), failure="it failed")
    assert verdict(evidence(), failed, **LOSS).verdict == NOT_PROVEN


def test_an_order_of_speed_counts_only_where_intervals_do_not_overlap() -> None:
    slow, fast = evidence(name="2a", seconds=0.4), evidence(name="2a", seconds=0.02)
    given = verdict(evidence(), slow, **SPEED)
    assert given.verdict == MET and "faster" in given.reason
    given = verdict(evidence(), fast, **SPEED)
    assert given.verdict == NOT_MET and "slower" in given.reason
    given = verdict(evidence(), evidence(name="2a", seconds=0.1005), **SPEED)
    assert given.verdict == MET and "the intervals overlap" in given.reason
    assert verdict(evidence(), replace(slow, failure="it failed"), **SPEED).verdict == NOT_PROVEN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unreadable": "the run is invalid: a link is off"}, "a link is off"),
        ({"trusted": False, "outside": UNCOUNTED}, "counters of node 0"),
        ({"outside": Outside(seconds=9.0, nodes=[Node(code=0, sent=1, received=1, refused=4)])}, "limit of processes"),
        ({"outside": Outside(seconds=1.0)}, "the whole run took 1.0 s"),
    ],
)
def test_times_of_a_part_that_proves_nothing_are_not_compared(change: dict[str, Any], reason: str) -> None:
    given = verdict(evidence(), replace(evidence(name="2a", seconds=0.4), **change), **SPEED)
    assert given.verdict == NOT_PROVEN and "the times of part 2a prove nothing" in given.reason
    assert reason in given.reason and given.evidence == RECORDS


def test_a_part_that_was_slower_beside_other_work_is_for_a_person_to_look_at() -> None:
    fast, busy = evidence(name="2a", seconds=0.02), "the machine was busy"
    for own, other in ((replace(evidence(), busy=busy), fast), (evidence(), replace(fast, busy=busy))):
        given = verdict(own, other, **SPEED)
        assert given.verdict == NOT_PROVEN and "slower" in given.reason and busy in given.reason
    slow = evidence(name="2a", seconds=0.4)
    assert verdict(replace(evidence(), busy=busy), slow, **SPEED).verdict == MET


def test_every_kind_has_a_judge_and_is_tested() -> None:
    assert set(JUDGES) == set(DEMANDS) == {each[0] for each in CASES} | {"loss", "speed"}


@pytest.mark.parametrize("kind", ["gradients", "replicas", "data"])
def test_records_that_contradict_the_counters_prove_nothing(kind: str) -> None:
    """Forged records claim an all_reduce; the interfaces counted nothing."""
    silent = Outside(seconds=10.0, nodes=[Node(code=0, sent=900, received=900)] * WORLD)
    given = verdict(replace(evidence(), outside=silent), kind=kind)
    assert given.verdict == NOT_PROVEN and given.points == 0 and "counted" in given.reason


def test_a_demand_that_rests_on_outside_evidence_is_judged_all_the_same() -> None:
    silent = Outside(seconds=10.0, nodes=[Node(code=0, sent=900, received=900)] * WORLD)
    given = verdict(replace(evidence(), outside=silent), kind="bytes", **BANDS)
    assert given.verdict == NOT_MET and "sends 0.00 gradients" in given.reason and given.evidence == OUTSIDE


def test_a_missing_file_and_a_failed_run_give_nothing() -> None:
    given = verdict(None, evidence(name="1"), kind="gradients")
    assert given.verdict == NOT_MET and given.reason == "a.py is missing" and given.evidence == OUTSIDE
    given = verdict(replace(evidence(), failure="rank 1 was killed by SIGKILL"), kind="gradients")
    assert given.verdict == NOT_MET and "SIGKILL" in given.reason
    given = verdict(replace(evidence(), records=[], unreadable="line 3 is damaged"), kind="gradients")
    assert given.verdict == NOT_PROVEN and given.points == 0 and given.reason == "line 3 is damaged"


def test_an_invalid_run_proves_nothing_but_its_bytes() -> None:
    found = replace(evidence(), unreadable="the run is invalid: a link is off")
    given = verdict(found, kind="gradients")
    assert given.verdict == NOT_PROVEN and given.reason == "the run is invalid: a link is off"
    assert verdict(found, kind="bytes", **BANDS).verdict == MET


def test_an_attempt_to_leave_the_sandbox_gives_nothing_and_is_named() -> None:
    nodes = [*evidence().outside.nodes[:2], Node(code=0, sent=1, received=1, unreachable=4)]
    given = verdict(replace(evidence(), outside=Outside(seconds=9.0, nodes=nodes)), kind="runs")
    assert given.verdict == NOT_PROVEN and given.points == 0
    assert given.reason.startswith("node 2 tried 4 times to reach an address beyond its nodes")


@pytest.mark.parametrize("kind", ["runs", "gradients", "bytes"])
def test_without_the_counters_of_a_node_nothing_of_an_untrusted_submission_is_proven(kind: str) -> None:
    nodes = [*evidence().outside.nodes[:2], Node(code=0)]
    found = replace(evidence(), outside=Outside(seconds=9.0, nodes=nodes), trusted=False)
    given = verdict(found, kind=kind, **(BANDS if kind == "bytes" else {}))
    assert given.verdict == NOT_PROVEN and given.points == 0 and given.evidence == OUTSIDE
    assert given.reason.startswith("the counters of node 2 could not be read")


def test_without_counters_bytes_rest_on_records() -> None:
    given = verdict(replace(evidence(), outside=UNCOUNTED), kind="bytes", rank0=[0, 9], others=[0, 9])
    assert given.verdict == MET and given.evidence == "records"


@pytest.mark.parametrize(("shared", "expected"), [(2, NOT_MET), (1, MET)])
def test_images_are_compared_one_by_one_where_the_records_have_them(shared: int, expected: str) -> None:
    """Batches with images in common have different hashes. One image in common may be in the data set twice."""
    found = evidence()
    records = []
    for rank, rows in enumerate(found.records):
        own = [f"{rank} {number}" for number in range(8 - shared)] + [f"shared {number}" for number in range(shared)]
        records.append([replace(row, detail={"samples": own}) if isinstance(row, Batch) else row for row in rows])
    assert verdict(replace(found, records=records), kind="data").verdict == expected
