"""The history of a run with faults, as a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.results.faults import TimedStep, fault_table, read_history, steps_under_fault
from testbed.results.folder import RunFolder
from testbed.spec.errors import SpecError
from testbed.spec.fault import Fault
from testbed.spec.run import RunSpec

SPEC = RunSpec.load({"nodes": 3, "batch": 6, "name": "r", "faults": ["kill:rank1@step5"]}, "test")
INJECTED = {"event": "injected", "fault": "kill:rank1@step5", "rank": 1, "step": 5, "begun": 10.0, "at": 10.1}


def saw(rank: int, failed_rank: int | None, at: float) -> dict[str, object]:
    return {"event": "saw", "rank": rank, "failed_rank": failed_rank, "at": at, "code": 6, "message": ""}


def ended(rank: int, code: int) -> dict[str, object]:
    return {"event": "ended", "rank": rank, "code": code, "at": 12.0}


def write(folder: Path, *events: dict[str, object]) -> RunFolder:
    run = RunFolder(folder)
    run.faults.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_row_shows_when_ranks_noticed_and_how_the_run_ended(tmp_path: Path) -> None:
    run = write(tmp_path, INJECTED, saw(0, 1, 10.5), saw(2, 1, 10.7), ended(0, 6), ended(1, -9), ended(2, 6))
    assert fault_table([(run, SPEC, "failed")]) == [("r", "kill:rank1@step5", "0.60 s", "yes", "6 -9 6", "no")]


def test_most_of_the_ranks_that_noticed_decide_whether_the_fault_was_named_right(tmp_path: Path) -> None:
    wrong = write(tmp_path, INJECTED, saw(0, 2, 10.5))
    assert read_history(wrong).named_right is False
    outvoted = write(tmp_path, INJECTED, saw(0, 1, 10.5), saw(2, 1, 10.5), saw(1, 0, 10.5))
    assert read_history(outvoted).named_right is True


def test_of_several_faults_the_one_that_ranks_noticed_is_judged(tmp_path: Path) -> None:
    slower = {"event": "injected", "fault": "rate:rank0@step1=50mbit", "rank": 0, "step": 1, "begun": 2.0, "at": 2.1}
    both = write(tmp_path, slower, INJECTED, saw(0, 1, 10.5), saw(2, 1, 10.7), ended(1, -9))
    assert read_history(both).named_right is True
    assert read_history(both).median_notice_s == pytest.approx(0.6)
    later = [ended(0, 6), ended(2, 6), {"event": "again", "at": 13.0}, INJECTED | {"begun": 20.0}, saw(0, 1, 20.2)]
    assert read_history(write(tmp_path, slower, *later)).last_notice_s == pytest.approx(0.2)


def test_a_retried_run_shows_the_codes_of_the_attempt_that_failed(tmp_path: Path) -> None:
    second = [{"event": "again", "at": 13.0}, ended(0, 0), ended(1, 0), ended(2, 0)]
    killed = [ended(0, 6), ended(1, -9), ended(2, 6)]
    frozen = [ended(0, 6), ended(2, 6)]  # the one that was lost never ended, it was stopped
    for first, codes in ((killed, "6 -9 6"), (frozen, "6 stopped 6")):
        ((*_, shown, recovered),) = fault_table([(write(tmp_path, INJECTED, *first, *second), SPEC, "ok")])
        assert (shown, recovered) == (codes, "restarted")


def test_a_fault_that_was_never_due_is_shown_as_not_injected(tmp_path: Path) -> None:
    both = SPEC.model_copy(update={"faults": (*SPEC.faults, Fault.parse("cut:rank2@step99"))})
    ends = [ended(rank, 0) for rank in range(3)]
    ((_, faults, *_, recovered),) = fault_table([(write(tmp_path, INJECTED, *ends), both, "ok")])
    assert (faults, recovered) == ("kill:rank1@step5 cut:rank2@step99 (not injected)", "went on")
    rows = fault_table([(write(tmp_path, *ends), SPEC, "ok")])
    assert rows == [("r", "kill:rank1@step5 (not injected)", "-", "-", "0 0 0", "-")]
    assert fault_table([(write(tmp_path), SPEC, "failed")]) == []  # it did not begin


def test_a_run_without_faults_has_no_row_and_a_damaged_history_is_refused(tmp_path: Path) -> None:
    assert fault_table([(RunFolder(tmp_path), RunSpec(), "ok")]) == []
    (tmp_path / "faults.jsonl").write_text("[]\n")
    with pytest.raises(SpecError, match="line 1"):
        read_history(RunFolder(tmp_path))


OVER = {"event": "over", "fault": "rate:rank1@step5=1mbit", "rank": 1, "at": 12.5}
RATE = INJECTED | {"fault": "rate:rank1@step5=1mbit"}
AGAIN = {"event": "again", "at": 12.5}
# Steps 0 to 9 of two ranks take a second each and begin at 5, 6, ..; the fault begins at 10, in step 5.
STEPS = [[TimedStep(k, 5.0 + k, 6.0 + k, None) for k in range(10)] for _ in range(2)]
RESTARTED = [[step._replace(attempt=1 if step.number < 7 else None) for step in steps] for steps in STEPS]
CASES: dict[str, tuple[list[dict[str, object]], list[int]]] = {
    "to the end of the run": ([RATE, ended(0, 0) | {"at": 15.0}, ended(1, 0) | {"at": 15.0}], [5, 6, 7, 8, 9]),
    "for some time": ([RATE, OVER, ended(0, 0), ended(1, 0)], [5, 6, 7]),
    "until all ranks started again": ([INJECTED, AGAIN], [5, 6, 7]),
    "until the run was resumed by hand": (
        [INJECTED, ended(0, 6), ended(1, -9), ended(0, 0) | {"at": 15.0}, ended(1, 0) | {"at": 15.0}],
        [5, 6],
    ),
    "no fault was injected": ([ended(0, 0), ended(1, 0)], []),
}


@pytest.mark.parametrize(("events", "under"), CASES.values(), ids=CASES.keys())
def test_a_step_is_under_a_fault_while_it_is_in_force(
    tmp_path: Path, events: list[dict[str, object]], under: list[int]
) -> None:
    found = steps_under_fault(read_history(write(tmp_path, *events)), STEPS, one_clock=True)
    assert sorted(found) == under and all(len(kinds) == 1 for kinds in found.values())


def test_a_step_that_one_rank_alone_did_under_the_fault_counts(tmp_path: Path) -> None:
    late = [[step._replace(end=step.end + 4.5) if step.number == 1 else step for step in STEPS[0]], STEPS[1]]
    found = steps_under_fault(read_history(write(tmp_path, RATE, OVER)), late, one_clock=True)
    assert sorted(found) == [1, 5, 6, 7] and found[1] == ["rate"]


def test_without_a_common_clock_all_later_steps_of_the_attempt_are_under_the_fault(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, RATE, OVER, ended(0, 0), ended(1, 0)))
    assert sorted(steps_under_fault(history, STEPS, one_clock=False)) == [5, 6, 7, 8, 9]
    again = read_history(write(tmp_path, INJECTED, AGAIN, ended(0, 0), ended(1, 0)))
    assert sorted(steps_under_fault(again, RESTARTED, one_clock=False)) == [5, 6]
