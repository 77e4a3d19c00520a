"""Summary: hand-made records with known answers; runs that do not count stay out of tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from testbed.spec.errors import SchemaError, SpecError
from testbed.spec.folder import RunFolder, write_whole
from testbed.spec.records import Eval, Hash, Start, Step, encode
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.summary import HEADER, Summary, caption, left_out, summarise, table


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
        counter="tcp sockets",
        environment={"torch": "2.13.0"},
    )


def step(number: int, total: float, loss: float = 1.0, sent: int | None = 0, received: int | None = 0) -> Step:
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update"), 0.0)
    return Step(step=number, epoch=0, total=total, loss=loss, images=4, sent=sent, received=received, **times)


def evaluation(correct: int, loss: float) -> Eval:
    return Eval(
        step=6, epoch=0, loss=loss, correct=correct, images=10, scope="this rank", train_loss=0, train_accuracy=0
    )


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


def test_bytes_per_step_leave_out_what_warm_up_sent(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = summarise(folder, spec_of(), status="ok")
    assert summary.sent_per_step == [1000.0, 2000.0]
    assert summary.received_per_step == [10.0, 10.0]


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
    assert cell(table([summary])[0], "MB sent") == "-"


# --- summary.json ------------------------------------------------------------------------------------------------


def save(folder: RunFolder, summary: Summary) -> None:
    write_whole(folder.summary, summary.model_dump_json(by_alias=True))


def test_a_summary_survives_the_way_through_its_file(folder: RunFolder) -> None:
    write_two_ranks(folder)
    summary = summarise(folder, spec_of(), status="ok", substrate="process", notes=["unshaped"])
    save(folder, summary)
    assert Summary.read(folder) == summary


def test_a_run_whose_loss_diverged_can_be_read_back(folder: RunFolder) -> None:
    for rank in range(2):
        write(folder, rank, start(rank, 2), *(step(k, 1.0, loss=math.nan if k > 3 else math.inf) for k in range(6)))
    save(folder, summarise(folder, spec_of(), status="ok"))
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


# --- the table ---------------------------------------------------------------------------------------------------


def made(mode: str, seconds: float, **values: Any) -> Summary:
    facts = {key: values.pop(key) for key in list(values) if key in Summary.model_fields}
    facts = {"status": "ok", "substrate": "process", "replicas_agree": True} | facts
    return Summary(spec=spec_of(mode=mode, name=mode.replace("/", "_"), **values), seconds_per_step=seconds, **facts)


def cell(row: tuple[str, ...], title: str) -> str:
    return row[next(k for k, name in enumerate(HEADER) if name.startswith(title))]


def test_every_row_has_a_cell_per_heading() -> None:
    assert all(len(row) == len(HEADER) for row in table([made("single", 2.0), made("ring", 1.0)]))


def test_speed_up_is_over_the_single_node_of_the_same_work() -> None:
    other_model = made("single", 100.0, model="vgg11")
    other_batch = made("single", 100.0, batch=16)
    other_place = made("single", 100.0, substrate="netns")
    rows = table([other_model, other_batch, other_place, made("single", 2.0), made("ring", 0.8)])
    assert cell(rows[-1], "speed-up") == "2.50"
    assert cell(rows[3], "speed-up") == "1.00"


def test_without_a_baseline_no_speed_up_is_claimed() -> None:
    assert cell(table([made("ring", 0.8)])[0], "speed-up") == "-"
    failed = made("single", 2.0, status="failed")
    assert cell(table([failed, made("ring", 0.8)])[0], "speed-up") == "-"


def test_agreement_is_yes_no_or_does_not_apply() -> None:
    summaries = [
        made("single", 2.0),
        made("ring", 1.0),
        made("tree", 1.0, replicas_agree=False),
        made("ddp", 1.0, replicas_agree=None),
    ]
    assert [cell(row, "replicas") for row in table(summaries)] == ["-", "yes", "NO", "-"]


@pytest.mark.parametrize("status", ["invalid", "failed", "interrupted"])
def test_a_run_that_does_not_count_is_left_out_and_named(status: str) -> None:
    summaries = [made("ring", 1.0, status=status, reason="receipt off by 9 %"), made("tree", 1.0)]
    assert [row[0] for row in table(summaries)] == ["tree"]
    assert left_out(summaries) == [f"ring: {status}, receipt off by 9 %"]


def test_a_row_says_what_was_measured_in_the_units_of_its_heading() -> None:
    summary = made("ring", 1.23456, test_loss=2.0, test_accuracy=0.1875, sent_per_step=[3e6, 1e6, 2e6])
    row = table([summary])[0]
    assert cell(row, "s/iter") == "1.235"
    assert cell(row, "accuracy") == "18.8 %"
    assert cell(row, "MB sent") == "3.0, 1.5"


def test_a_row_says_when_synchronising_came_after_the_step() -> None:
    assert table([made("ring", 1.0, placement="after-step")])[0][0] == "ring (after step)"


def test_the_caption_says_what_all_rows_share() -> None:
    text = caption([made("ring", 1.0, link={"rate": "200mbit"}, node={"cpus": 0.4}, substrate="netns", steps=6)])
    for words in (
        "lenet5 on synthetic",
        "batch 8 over all ranks",
        "2 equal nodes",
        "0.4 cores",
        "200mbit each way",
        "netns",
    ):
        assert words in text
    assert "unshaped" in caption([made("ring", 1.0, link={"rate": "200mbit"})])  # plain processes shape nothing
    assert caption([]) == ""
