"""Summary: hand-made records with known answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.results.conclude import NO_INTERNET, Summary, conclude, root_cause, summarise
from testbed.results.folder import RunFolder
from testbed.results.records import (
    End,
    Eval,
    Hash,
    Start,
    Step,
    encode,
)
from testbed.spec import disk
from testbed.spec.errors import (
    DiskFull,
    NetworkInvalid,
    PeerLost,
    RankFailed,
    ReplicasDiffer,
    SchemaError,
    SpecError,
    TestbedError,
    UsageError,
)
from testbed.spec.run import SCHEMA, RunSpec
from tests.support.scripted_runs import Script, make_script_run
from tests.support.synthetic import EFFICIENCY


def spec_of(**values: Any) -> RunSpec:
    defaults = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "nodes": 2, "warmup": 2, "steps": 6}
    return RunSpec.load(defaults | values, "here")


def start(rank: int, world: int) -> Start:
    return Start(
        rank=rank,
        world=world,
        unix=0.0,
        parameters=10,
        gradient_bytes=40,
        tensors=2,
        deadline=60.0,
        counter="tcp sockets",
        environment={"torch": "2.13.0"},
    )


def step(number: int, total: float, **values: Any) -> Step:
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update"), 0.0)
    others = {"epoch": 0, "loss": 1.0, "images": 4, "sent": 0, "received": 0} | times | values
    return Step(step=number, total=total, **others)


def evaluation(correct: int, loss: float) -> Eval:
    return Eval(
        step=6, epoch=0, loss=loss, correct=correct, images=10, scope="this rank", train_loss=0, train_accuracy=0
    )


def end(machine_cpu: float, own_cpu: float) -> End:
    measured: dict[str, Any] = {"machine": "boot", "measured": 10.0, "machine_cpu": machine_cpu, "own_cpu": own_cpu}
    return End(steps=0, seconds=10.0, sent=0, received=0, **measured)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write(folder: RunFolder, rank: int, *records: Any) -> None:
    folder.records(rank).write_text("".join(encode(record) + "\n" for record in records))


def write_two_ranks(folder: RunFolder, hashes: tuple[str, str] = ("a", "a")) -> None:
    """Totals: rank 0 100, 50, 1, 2, 3, 10; rank 1 one second more from step 2 on."""
    for rank in range(2):
        totals = [100.0, 50.0, *(t + rank for t in (1.0, 2.0, 3.0, 10.0))]
        steps = [step(k, t, loss=k + rank, sent=1000 * k * (rank + 1), received=10 * k) for k, t in enumerate(totals)]
        write(
            folder,
            rank,
            start(rank, 2),
            Hash(step=0, parameters="same", agree=True),
            *steps,
            Hash(step=6, parameters=hashes[rank], agree=hashes[0] == hashes[1]),
            evaluation(3 + 2 * rank, 1.0 + rank),
        )


# --- one run -----------------------------------------------------------------------------------------------------


def test_time_is_the_median_over_steps_of_the_mean_over_ranks_without_warm_up(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.steps == 4
    assert summary.seconds_per_step == pytest.approx(3.0)  # median of 1.5, 2.5, 3.5, 10.5
    assert summary.seconds_spread == pytest.approx((2.25, 5.25))
    assert summary.per_rank_seconds == pytest.approx([4.0, 5.0])


def test_a_single_node_whose_copies_did_not_all_run_to_their_end_is_no_baseline(folder: RunFolder) -> None:
    write_two_ranks(folder)
    for number in (1, 2, 3):
        folder.copy(number).path.mkdir()
        write(folder.copy(number), 0, start(0, 1), *([end(1.0, 1.0)] if number < 3 else []))
    summary = summarise(folder, spec_of(), status="ok")
    assert (summary.status, summary.copies) == ("invalid", 2)
    assert summary.reason.startswith("1 of 3 copies of the job did not run to their end")
    write(folder.copy(3), 0, start(0, 1), end(1.0, 1.0))
    assert summarise(folder, spec_of(), status="ok").status == "ok"


RATE = "rate:rank1@step4=1mbit"


def write_under_fault(folder: RunFolder, begun: float) -> None:
    """Step k begins at second 100 k and takes k seconds; a fault that is never undone begins at `begun`."""
    for rank in range(2):
        write(folder, rank, start(rank, 2), *(step(k, float(k), at=100.0 * k, sent=10 * k * k) for k in range(6)))
    event = {"event": "injected", "fault": RATE, "rank": 1, "step": 4, "begun": begun, "at": begun}
    folder.faults.write_text(json.dumps(event) + "\n")


def test_steps_under_a_fault_are_in_no_figure_and_are_counted(folder: RunFolder) -> None:
    write_under_fault(folder, begun=401.0)
    summary = summarise(folder, spec_of(faults=[RATE]), status="ok")
    assert (summary.steps, summary.seconds_per_step) == (2, 2.5)
    assert (summary.left_out_steps, summary.left_out_reason) == (2, "rate fault")
    assert summary.per_rank_seconds == [2.5, 2.5] and summary.sent_per_step == [50.0, 50.0]
    assert len(summary.losses) == 6
    assert summarise(folder, spec_of(), status="ok").steps == 4  # a history without faults in the spec is not its own


def test_a_run_whose_every_step_was_under_a_fault_has_no_seconds(folder: RunFolder) -> None:
    write_under_fault(folder, begun=0.0)
    summary = summarise(folder, spec_of(faults=[RATE]), status="ok")
    assert (summary.steps, summary.seconds_per_step, summary.seconds_spread) == (0, None, None)
    assert summary.left_out_steps == 4 and summary.status == "ok"


def test_an_older_summary_is_read_without_the_steps_under_a_fault(folder: RunFolder) -> None:
    write_under_fault(folder, begun=401.0)
    conclude(folder, spec_of(faults=[RATE]), status="ok", substrate="netns")
    values = json.loads(folder.summary.read_text())
    older = {key: value for key, value in values.items() if not key.startswith("left_out")}
    folder.summary.write_text(json.dumps(older | {"seconds_per_step": 3.5, "steps": 4}))
    summary = Summary.read(folder)
    assert (summary.steps, summary.seconds_per_step, summary.left_out_steps) == (2, 2.5, 2)


def test_a_summary_says_whether_its_nodes_had_one_clock(folder: RunFolder) -> None:
    """Where they had not, the time at which a fault began says nothing of their steps: its step does."""
    write_under_fault(folder, begun=0.0)
    own = conclude(folder, spec_of(faults=[RATE]), status="ok", substrate="new", one_clock=False)
    assert (own.one_clock, own.steps, own.left_out_steps) == (False, 2, 2)
    assert Summary.read(folder).one_clock is False


@pytest.mark.parametrize(("substrate", "one_clock"), [("hosts", False), ("slurm", False), ("netns", True)])
def test_of_an_older_summary_it_is_known_by_its_substrate(folder: RunFolder, substrate: str, one_clock: bool) -> None:
    write_under_fault(folder, begun=401.0)
    conclude(folder, spec_of(faults=[RATE]), status="ok", substrate=substrate)
    values = json.loads(folder.summary.read_text())
    folder.summary.write_text(json.dumps({key: value for key, value in values.items() if key != "one_clock"}))
    assert Summary.read(folder).one_clock is one_clock


def test_a_run_that_was_faster_than_its_links_is_invalid_with_the_arithmetic(folder: RunFolder) -> None:
    for rank in range(2):
        steps = [step(k, 0.01, at=0.01 * k, sent=10**6 * k, received=10**6 * k) for k in range(6)]
        first = start(rank, 2)
        write(
            folder, rank, replace(first, counter="interface eth0"), *steps, End(steps=6, seconds=1, sent=1, received=1)
        )
    assert summarise(folder, spec_of(), status="ok").status == "ok"  # unshaped
    summary = summarise(folder, spec_of(link={"rate": "10mbit"}), status="ok")
    assert summary.status == "invalid" and summary.seconds_per_step == pytest.approx(0.01)
    assert "rank 0 sent 5 MB during 5 steps in 0.05 s: at 10mbit that takes at least 4 s" in summary.reason
    failed = summarise(folder, spec_of(link={"rate": "10mbit"}), status="failed", reason="rank 1 died")
    assert (failed.status, failed.reason) == ("failed", "rank 1 died")


def test_bytes_per_step_leave_out_what_warm_up_sent(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.sent_per_step == [1000.0, 2000.0]
    assert summary.received_per_step == [10.0, 10.0]


def test_bytes_that_a_test_between_epochs_sent_are_counted_for_no_step(folder: RunFolder) -> None:
    """Steps 0..5 in epochs of three send 100 each; the test after the first epoch sends 10,000."""
    for rank in range(2):
        sent = [100 * (k + 1) + 10_000 * (k >= 3) for k in range(6)]
        steps = [step(k, 1.0, epoch=k // 3, sent=sent[k], received=2 * sent[k]) for k in range(6)]
        write(folder, rank, start(rank, 2), *steps)
    summary = summarise(folder, spec_of(warmup=1), status="ok")
    assert (summary.sent_per_step, summary.received_per_step) == ([100.0, 100.0], [200.0, 200.0])


def test_where_every_epoch_is_one_step_what_lies_between_counts(folder: RunFolder) -> None:
    for rank in range(2):
        write(folder, rank, start(rank, 2), *(step(k, 1.0, epoch=k, sent=700 * k) for k in range(6)))
    assert summarise(folder, spec_of(), status="ok").sent_per_step == [700.0, 700.0]


def test_losses_are_of_every_step_and_weighted_by_share(folder: RunFolder) -> None:
    write_two_ranks(folder)
    assert summarise(folder, spec_of(), status="ok").losses == pytest.approx([k + 0.5 for k in range(6)])
    uneven = spec_of(data={"name": "synthetic", "shares": [2, 6]})
    assert summarise(folder, uneven, status="ok").losses == pytest.approx([k + 0.75 for k in range(6)])


def test_accuracy_is_the_mean_over_ranks_and_each_rank_is_kept(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.test_accuracy == pytest.approx(0.4)
    assert summary.per_rank_accuracy == [0.3, 0.5]
    assert summary.test_loss == pytest.approx(1.5)


@pytest.mark.parametrize(("hashes", "agree"), [(("a", "a"), True), (("a", "b"), False)])
def test_replicas_agree_when_the_last_hashes_are_equal(folder: RunFolder, hashes: tuple[str, str], agree: bool) -> None:
    write_two_ranks(folder, hashes)
    assert summarise(folder, spec_of(), status="ok").replicas_agree is agree


def test_equal_hashes_of_different_steps_do_not_agree(folder: RunFolder) -> None:
    write(folder, 0, start(0, 2), Hash(step=3, parameters="a", agree=True))
    write(folder, 1, start(1, 2), Hash(step=6, parameters="a", agree=True))
    assert summarise(folder, spec_of(), status="ok").replicas_agree is False


def test_a_rank_without_a_hash_leaves_agreement_open(folder: RunFolder) -> None:
    write(folder, 0, start(0, 2), Hash(step=6, parameters="a", agree=True))
    write(folder, 1, start(1, 2))
    assert summarise(folder, spec_of(), status="failed").replicas_agree is None


def test_a_run_that_died_early_is_summed_up_as_far_as_it_came(folder: RunFolder) -> None:
    write(folder, 0, start(0, 2), step(0, 1.0), step(1, 1.0), step(2, 5.0))
    summary = summarise(folder, spec_of(), status="failed", reason="rank 1 died")
    assert (summary.seconds_per_step, summary.steps, summary.test_loss) == (None, 0, None)
    assert summary.per_rank_seconds == [5.0, None]
    assert summary.sent_per_step == [None, None]


def test_where_nothing_counts_bytes_none_are_claimed(folder: RunFolder) -> None:
    for rank in range(2):
        write(folder, rank, start(rank, 2), *(step(k, 1.0, sent=None, received=None) for k in range(6)))
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.sent_per_step == [None, None]


def test_what_others_used_of_the_machine_is_in_the_summary(folder: RunFolder) -> None:
    spec = spec_of()
    for rank in range(2):
        write(folder, rank, replace(start(rank, 2), environment={"cores": 2, "load": 3.5}), end(18.0, 3.0))
    (found,) = conclude(folder, spec, status="failed", substrate="netns").machines
    assert (found.ranks, found.others, found.load_at_start) == ([0, 1], 1.2, 3.5)
    assert Summary.read(folder).machines == [found]


def test_a_summary_without_the_load_of_its_machines_can_be_read(folder: RunFolder) -> None:
    write_two_ranks(folder)
    assert conclude(folder, spec_of(), status="ok", substrate="netns").machines == []
    values = json.loads(folder.summary.read_text())
    del values["machines"]
    folder.summary.write_text(json.dumps(values))
    assert Summary.read(folder).machines == []


# --- several attempts --------------------------------------------------------------------------------------------


def write_restarted(folder: RunFolder, begin: int) -> None:
    """Steps 0..2 are of attempt 1, 3..5 of the last one, whose counters are `begin` off from the first one's."""
    for rank in range(2):
        first = [step(k, 1.0, attempt=1, sent=1000 + 100 * k, received=100 * k) for k in range(3)]
        last = [step(k, 1.0, sent=begin + 100 * k, received=begin + 100 * k) for k in range(3, 6)]
        write(folder, rank, start(rank, 2), *first, *last)
        (folder.path / f"rank{rank}.attempt1.jsonl").write_text("")


@pytest.mark.parametrize("begin", [5000, -300], ids=["the interface counted on", "a new process counts anew"])
def test_bytes_between_two_attempts_are_counted_for_no_step(folder: RunFolder, begin: int) -> None:
    write_restarted(folder, begin=begin)
    summary = summarise(folder, spec_of(warmup=1), status="ok")
    assert (summary.sent_per_step, summary.received_per_step) == ([100.0, 100.0], [100.0, 100.0])


def test_a_restarted_run_says_from_where_it_went_on(folder: RunFolder) -> None:
    write_restarted(folder, begin=0)
    summary = summarise(folder, spec_of(), status="ok", notes=["unshaped"])
    assert summary.status == "ok"
    assert summary.notes == ["unshaped", "resumed after step 3: the steps before it were done by an earlier attempt"]
    write_two_ranks(folder)
    (note,) = summarise(folder, spec_of(), status="ok").notes
    assert note == "started again from the beginning: there was no checkpoint that all ranks have"
    write(folder, 0, start(0, 2))
    write(folder, 1, start(1, 2))
    assert summarise(folder, spec_of(), status="failed").notes == []  # no rank did a step


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([3, 4, 5], r"rank 1 has no record of step 0 \(step 3 is in its place\)"),
        ([0, 1, 3, 4, 5], r"rank 1 has no record of step 2 \(step 3 is in its place\)"),
        ([0, 1, 1, 2, 3, 4, 5], r"rank 1 has no record of step 2 \(step 1 is in its place\)"),
        ([0, 1, 2, 3, 4, 5, 5], r"rank 1 has no record of step 6 \(step 5 is in its place\)"),
        ([0, 1, 2, 3, 4], r"rank 1 has no record of step 5 \(nothing follows\)"),
    ],
)
def test_a_run_with_a_gap_in_its_steps_is_not_ok(folder: RunFolder, numbers: list[int], reason: str) -> None:
    write(folder, 0, start(0, 2), *(step(k, 1.0) for k in range(6)))
    write(folder, 1, start(1, 2), *(step(k, 1.0) for k in numbers))
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.status == "failed" and re.match(reason, summary.reason), summary.reason
    assert summarise(folder, spec_of(), status="invalid", reason="network").reason == "network"


def test_steps_that_all_ranks_lack_are_missed_by_what_they_said_at_the_end(folder: RunFolder) -> None:
    for rank in range(2):
        end = End(steps=6, seconds=1.0, sent=0, received=0)
        write(folder, rank, start(rank, 2), *(step(k, 1.0) for k in range(4)), end)
    assert "no record of step 4" in summarise(folder, spec_of(), status="ok").reason


def test_a_rank_whose_records_are_on_a_disk_of_its_own_fails_nobody(folder: RunFolder) -> None:
    write(folder, 0, start(0, 2), *(step(k, 1.0) for k in range(6)))
    assert summarise(folder, spec_of(), status="ok").status == "ok"


# --- summary.json ------------------------------------------------------------------------------------------------


def test_a_summary_survives_the_way_through_its_file(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = conclude(folder, spec_of(), status="ok", substrate="process", notes=["unshaped"])
    assert Summary.read(folder) == summary


def test_conclude_removes_the_temporary_files_of_killed_writers(folder: RunFolder) -> None:
    write_two_ranks(folder)
    (folder.path / ".rank0-step10.json.x.tmp").write_text("{")
    conclude(folder, spec_of(), status="failed", reason="rank 1 was killed", substrate="process")
    assert sorted(path.name for path in folder.path.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "summary.json"]


def test_a_summary_that_cannot_be_written_is_told_in_a_sentence(folder: RunFolder) -> None:
    write_two_ranks(folder)
    folder.summary.mkdir()
    with pytest.raises(TestbedError, match=r"summary\.json.*: Is a directory, so nothing was finished\. \w+"):
        conclude(folder, spec_of(), status="ok", substrate="process")


def test_a_run_whose_loss_diverged_can_be_read_back(folder: RunFolder) -> None:
    for rank in range(2):
        write(folder, rank, start(rank, 2), *(step(k, 1.0, loss=math.nan if k > 3 else math.inf) for k in range(6)))
    conclude(folder, spec_of(), status="ok", substrate="process")
    json.loads(folder.summary.read_text(), parse_constant=pytest.fail)  # and it is plain JSON
    losses = Summary.read(folder).losses
    assert losses[:4] == [math.inf] * 4
    assert all(math.isnan(loss) for loss in losses[4:])


def test_a_summary_of_another_schema_is_refused_by_number(folder: RunFolder) -> None:
    folder.summary.write_text(json.dumps({"schema": SCHEMA + 1, "a key of the future": 1}))
    with pytest.raises(SchemaError, match=f"schema {SCHEMA + 1}, this testbed reads schema {SCHEMA}"):
        Summary.read(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", json.dumps({"schema": SCHEMA, "status": "ok"})])
def test_a_damaged_summary_is_refused_with_a_sentence(folder: RunFolder, text: str) -> None:
    folder.summary.write_text(text)
    with pytest.raises(SpecError) as refusal:
        Summary.read(folder)
    assert "\n" not in str(refusal.value)


# --- the root cause of a failure -----------------------------------------------------------------------------------


def error(code: int, message: str, failed_rank: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "failed_rank": failed_rank}


def cause(
    folder: RunFolder, codes: list[int | None], *errors: dict[str, Any] | None, last: int = 3, ended: Sequence[int] = ()
) -> TestbedError:
    errors += (None,) * (len(codes) - len(errors))
    nodes = [f"node{k}" for k in range(len(codes))]
    return root_cause(codes, errors, ended=ended, last_steps=[last] * len(codes), nodes=nodes, folder=folder)


def test_a_rank_that_ended_for_its_own_reason_is_the_root_cause(folder: RunFolder) -> None:
    lost = error(6, "rank 1 (node1) failed: OSError", 1)
    found = cause(folder, [6, 1, 6], lost, error(1, "OSError: no space"), lost)
    assert type(found) is RankFailed
    assert str(found) == (
        "rank 1 (node1) ended with code 1 after step 4: OSError: no space. "
        f"Then rank 0, rank 2 lost it. See {folder.log(1)}"
    )


def test_of_a_script_that_printed_nothing_no_words_are_quoted(folder: RunFolder) -> None:
    silent = error(3, "") | {"script_code": 3}
    found = cause(folder, [3, 3], silent, silent, last=-1)
    own = "rank 0 (node0) ended with code 3 before its first step."
    assert str(found) == f"{own} Also rank 1 ended with code 3. See {folder.log(0)}"


@pytest.mark.parametrize(
    ("said", "outside"),
    [
        ("RuntimeError: Error downloading train-images-idx3-ubyte.gz:", True),
        ("URLError: <urlopen error [Errno -3] Temporary failure in name resolution>", True),
        ("ValueError: the network has no layers", False),
    ],
)
def test_a_script_that_looks_for_the_internet_is_told_where_its_data_belong(
    folder: RunFolder, said: str, outside: bool
) -> None:
    failed = error(1, said) | {"script_code": 1}
    assert (NO_INTERNET in str(cause(folder, [3, 3], failed, failed, last=-1))) == outside


def test_a_rank_that_ended_with_a_signal_is_named_with_it(folder: RunFolder) -> None:
    assert "rank 2 (node2) was killed by SIGKILL before its first step" in str(cause(folder, [6, 6, -9], last=-1))


def test_a_rank_that_has_not_ended_is_the_one_that_most_report(folder: RunFolder) -> None:
    silent = error(6, "rank 2 (node2) is silent for 5.0 s", 2)
    found = cause(folder, [6, 6, None, None], silent, silent)
    seen = "rank 0, rank 1 lost it (rank 2 (node2) is silent for 5.0 s)"
    assert str(found) == f"rank 2 (node2) is silent since step 4; {seen}. See {folder.log(2)}"


def test_a_rank_that_never_reached_a_step_is_silent_since_its_start(folder: RunFolder) -> None:
    silent = error(6, "rank 1 (node1) is silent for 5.0 s", 1)
    found = cause(folder, [6, None, 6], silent, None, silent, last=-1)
    assert str(found).startswith("rank 1 (node1) is silent since its start, before the first step; rank 0, rank 2 lost")
    both = cause(folder, [6, 6], silent, error(6, "rank 0 (node0) is silent for 5.0 s", 0), last=-1)
    assert "lost each other since their start, before the first step." in str(both)


@pytest.mark.parametrize(("last", "when"), [(3, "after step 4"), (-1, "before its first step")])
def test_a_rank_that_ended_with_an_unknown_code_is_not_called_silent(folder: RunFolder, last: int, when: str) -> None:
    gone = error(6, "rank 2 (node2) is gone: its connection ended", 2)
    found = cause(folder, [6, 6, None, None], gone, gone, last=last, ended=[2])
    seen = "rank 0, rank 1 lost it (rank 2 (node2) is gone: its connection ended)"
    assert str(found) == f"rank 2 (node2) ended {when}; {seen}. See {folder.log(2)}"


def test_of_two_ranks_without_a_code_that_nobody_reports_the_one_that_ended_is_named(folder: RunFolder) -> None:
    found = cause(folder, [6, None, None], error(6, "rank 0 lost a peer"), ended=[2])
    assert str(found).startswith("rank 2 (node2) ended after step 4; rank 0 lost it")


def test_a_rank_that_could_not_write_is_named_with_the_reason_although_it_recorded_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cause(folder, [DiskFull.exit_code, PeerLost.exit_code])
    assert type(found) is RankFailed and found.exit_code == RankFailed.exit_code
    assert str(found).startswith("rank 0 (node0) could not write any more after step 4. Then rank 1 lost it.")
    monkeypatch.setattr(disk, "STEP_BYTES", 1 << 62)  # now its file system counts as full
    message = str(cause(folder, [DiskFull.exit_code] * 2))
    assert f"after step 4: {folder.path}: No space left on device (file system /" in message
    assert "Make room there" in message and "Also rank 1 could not write any more." in message


@pytest.mark.parametrize(("code", "kind"), [(4, ReplicasDiffer), (5, NetworkInvalid), (2, UsageError), (3, RankFailed)])
def test_the_root_cause_keeps_its_exit_code(folder: RunFolder, code: int, kind: type[TestbedError]) -> None:
    found = cause(folder, [code, 6], error(code, "as it said"))
    assert type(found) is kind and found.exit_code == code and "as it said" in str(found)


def test_where_no_rank_can_be_named_none_is_blamed(folder: RunFolder) -> None:
    """All ranks wait for each other in a user's method."""
    said = error(6, "deadlock in mean_ of methods/mine.py: all ranks run, but a rank waits for what no other sends.")
    found = cause(folder, [6, 6, 6], said, said, said)
    assert type(found) is RankFailed
    assert str(found) == f"{said['message']} See {folder.log(0)}"


def test_a_rank_that_ended_with_0_too_early_is_not_called_cut_off(folder: RunFolder) -> None:
    gone = error(6, "rank 1 (node1) is gone: its connection ended", 1)
    found = cause(folder, [6, 0, 6], gone, None, gone)
    assert str(found).startswith(
        "rank 1 (node1) ended with code 0 after step 4, although the run was not over; rank 0, "
    )


def test_a_script_s_figures_are_those_of_its_records(tmp_path: Path) -> None:
    summary = make_script_run(tmp_path / "s", Script(images=7))
    assert summary.status == "ok" and summary.steps == 10 and summary.images == [7.0] * 4
    assert summary.replicas_agree is True and summary.notes == []
    assert summary.losses[3] == pytest.approx(2.3 - 0.15)
    assert summary.sent_per_step[2] == pytest.approx(1.5 * 4_000_000 / EFFICIENCY, rel=1e-3)


def test_a_script_whose_ranks_do_unequal_numbers_of_steps_is_no_failure(tmp_path: Path) -> None:
    summary = make_script_run(tmp_path / "s", Script(more_steps={1: 1}))
    assert summary.status == "ok" and summary.steps == 10
    assert summary.notes == ["main.py: ranks did 12 to 13 steps; the 12 that all ranks have are compared"]


def test_a_script_s_rank_with_a_gap_in_its_steps_is_a_failure(tmp_path: Path) -> None:
    spec = make_script_run(tmp_path / "s").spec
    lines = (tmp_path / "s" / "rank1.jsonl").read_text().splitlines()
    (tmp_path / "s" / "rank1.jsonl").write_text("".join(f"{x}\n" for x in lines if '"step": 5,' not in x))
    summary = conclude(RunFolder(tmp_path / "s"), spec, status="ok", substrate="netns")
    assert summary.status == "failed" and "rank 1 has no record of step 5" in summary.reason


def test_replicas_of_a_script_that_differ_are_said_to_and_none_without_samples(tmp_path: Path) -> None:
    assert make_script_run(tmp_path / "a", Script(differ=True)).replicas_agree is False
    assert make_script_run(tmp_path / "b", Script(steps=1), warmup=0).replicas_agree is None


def test_each_optimizer_of_a_script_has_hashes_of_its_own(tmp_path: Path) -> None:
    def hashes(rank: int) -> str:
        return "".join(
            json.dumps({"kind": "parameters", "step": 9, "moment": "step", "hash": h, "detail": {"optimizer": k}})
            + "\n"
            for k, h in enumerate(("same", f"of rank {rank}"))
        )

    spec = make_script_run(tmp_path / "s").spec
    for rank in range(4):
        with (tmp_path / "s" / f"rank{rank}.jsonl").open("a") as file:
            file.write(hashes(rank))
    assert conclude(RunFolder(tmp_path / "s"), spec, status="ok", substrate="netns").replicas_agree is False


def test_steps_of_a_script_with_samples_are_reported_apart(tmp_path: Path) -> None:
    plain, summary = make_script_run(tmp_path / "a"), make_script_run(tmp_path / "b", Script(sampled=(0, 1, 3, 7)))
    assert (summary.steps, summary.sampled_steps) == (8, 2)
    assert summary.seconds_per_step == pytest.approx(plain.seconds_per_step)
    assert summary.sampled_seconds == pytest.approx((plain.seconds_per_step or 0) + 0.1)
    assert summary.sent_per_step == pytest.approx(plain.sent_per_step)


def test_a_script_with_samples_in_every_step_still_has_a_figure(tmp_path: Path) -> None:
    summary = make_script_run(tmp_path / "s", Script(sampled=tuple(range(12))))
    assert (summary.steps, summary.sampled_steps) == (10, 0)


def test_what_the_observer_could_not_see_is_a_note(tmp_path: Path) -> None:
    summary = make_script_run(tmp_path / "s", Script(unseen=("watch_waits",)))
    assert summary.notes == ["main.py: not seen on rank 0, 1, 2, 3: watch_waits (ValueError: made to fail)"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"world": 4', '"world": 1', "it made no process group of 4: every node trains alone"),
        (
            '"kind": "start", "rank": 3',
            '"kind": "start", "rank": 0',
            "the script's own ranks are 0 of 4, 1 of 4, 2 of 4, 0",
        ),
        ('"kind": "end"', '"kind": "end", "processes": 2', "2 processes trained on one node, and only the first"),
    ],
)
def test_nodes_that_are_no_process_group_have_a_note_and_no_verdict(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    spec = make_script_run(tmp_path / "s").spec
    for path in (tmp_path / "s").glob("rank*.jsonl"):
        path.write_text(path.read_text().replace(old, new))
    summary = conclude(RunFolder(tmp_path / "s"), spec, status="ok", substrate="netns")
    assert summary.replicas_agree is None and said in summary.notes[0] and summary.notes[0].startswith("main.py: ")


def test_a_script_s_loss_is_weighted_by_the_images_that_were_observed(tmp_path: Path) -> None:
    spec = make_script_run(tmp_path / "s", nodes=2).spec
    path = tmp_path / "s" / "rank1.jsonl"
    path.write_text(path.read_text().replace('"loss": 2.3, "images": 16', '"loss": 5.3, "images": 48'))
    summary = conclude(RunFolder(tmp_path / "s"), spec, status="ok", substrate="netns")
    assert summary.losses[0] == pytest.approx((16 * 2.3 + 48 * 5.3) / 64)


def test_a_script_that_was_interrupted_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    spec = make_script_run(tmp_path / "s", nodes=2).spec
    for rank in range(2):
        path = tmp_path / "s" / f"rank{rank}.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"kind": "step"' not in line))
    summary = conclude(RunFolder(tmp_path / "s"), spec, status="interrupted", substrate="netns")
    assert (summary.status, summary.steps, summary.seconds_per_step) == ("interrupted", 0, None)
