"""The table: a row per run that counts, a column per key that varies, a caption for what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.results.conclude import Summary
from testbed.results.table import (
    HEADER,
    caption,
    footnotes,
    format_results,
    format_table,
    left_out,
    table,
)
from testbed.spec.experiment import run_name
from testbed.spec.run import RunSpec
from tests.support.scripted_runs import Script, make_script_run
from tests.support.synthetic import make_run

FACTS = ("status", "reason", "substrate", "environment", "test_loss", "test_accuracy", "sent_per_step")
FACTS += ("replicas_agree", "machines", "copies")
BUSY = {"ranks": [0, 1], "cores": 2, "others": 1.2}
QUIET = BUSY | {"others": 0.1}


def made(mode: str, seconds: float, counted: int = 4, **values: Any) -> Summary:
    """A run of `mode` that took `seconds` per step; what is no fact about it goes into its spec."""
    facts: dict[str, Any] = {"status": "ok", "substrate": "netns", "replicas_agree": True, "steps": counted}
    facts |= {key: values.pop(key) for key in FACTS if key in values}
    defaults = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "nodes": 2, "warmup": 2, "steps": 6}
    if "batch_per_rank" in values:
        del defaults["batch"]
    spec = RunSpec.load({"mode": mode, "name": run_name(mode, 2), **defaults, **values}, "here")
    return Summary(spec=spec, seconds_per_step=seconds, **facts)


def column(summaries: list[Summary], title: str) -> list[str]:
    """One column's cells, by how its heading begins."""
    header, rows = table(summaries)
    (place,) = [k for k, name in enumerate(header) if name.startswith(title)]
    return [row[place] for row in rows]


# --- rows --------------------------------------------------------------------------------------------------------


def test_every_row_has_a_cell_per_heading() -> None:
    header, rows = table([made("single", 2.0), made("ring", 1.0)])
    assert header == HEADER
    assert [len(row) for row in rows] == [len(HEADER)] * 2


def test_a_single_node_beside_copies_of_itself_has_a_footnote() -> None:
    (note,) = footnotes([made("single", 2.0, copies=3), made("ring", 1.0)])
    assert note.startswith("single: 4 copies of the job ran at once, each with 1/4 of the machine")


def test_no_runs_make_an_empty_table() -> None:
    assert table([]) == (HEADER, [])
    assert caption([]) == ""


def test_agreement_is_yes_no_or_does_not_apply() -> None:
    summaries = [
        made("single", 2.0),
        made("ring", 1.0),
        made("tree", 1.0, replicas_agree=False),
        made("ddp", 1.0, replicas_agree=None),
    ]
    assert column(summaries, "replicas") == ["-", "yes", "NO", "-"]


def test_a_control_run_is_no_contestant_and_a_footnote_says_what_it_is() -> None:
    learnt = {"test_loss": 2.0, "test_accuracy": 0.1}
    summaries = [made("single", 2.0, **learnt), made("none", 0.5, replicas_agree=False, **learnt)]
    for title in ("speed-up", "replicas", "test loss", "accuracy"):
        assert column(summaries, title)[1] == "-"
    assert column(summaries, "s/iter") == ["2.000", "0.500"]
    (note,) = footnotes(summaries)
    assert note.startswith("none: ") and footnotes(summaries[:1]) == []


def test_a_run_beside_heavy_load_is_marked_and_a_footnote_says_why() -> None:
    """It stays in the table: the note does not make a run invalid."""
    summaries = [made("ring", 1.0, machines=[BUSY]), made("tree", 2.0, machines=[QUIET]), made("ddp", 3.0)]
    assert column(summaries, "s/iter") == ["1.000 *", "2.000", "3.000"]
    note = "*: other processes used 1.20 of 2 cores during the steps; limit 0.2; run it alone"
    assert footnotes(summaries) == [note] and footnotes(summaries[1:]) == []
    assert f"note: {note}" in format_results(summaries, "runs").splitlines()


def test_a_run_that_is_left_out_has_no_footnote_on_load() -> None:
    assert footnotes([made("ring", 1.0, status="failed", machines=[BUSY])]) == []


@pytest.mark.parametrize("status", ["invalid", "failed", "interrupted"])
def test_a_run_that_does_not_count_is_left_out_and_named(status: str) -> None:
    summaries = [made("ring", 1.0, status=status, reason="receipt off by 9 %"), made("tree", 1.0)]
    assert column(summaries, "mode") == ["tree"]
    assert left_out(summaries) == [f"ring-n2: {status}, receipt off by 9 %"]


def test_a_row_says_what_was_measured_in_the_units_of_its_heading() -> None:
    summaries = [made("ring", 1.23456, test_loss=2.0, test_accuracy=0.1875, sent_per_step=[3e6, 1e6, 2e6])]
    assert column(summaries, "s/iter") == ["1.235"]
    assert column(summaries, "accuracy") == ["18.8 %"]
    assert column(summaries, "MB sent") == ["3.0, 1.5"]


def test_where_nothing_counts_bytes_none_are_told() -> None:
    assert column([made("ring", 1.0, sent_per_step=[None, None])], "MB sent") == ["-"]


def test_a_row_says_when_synchronising_came_after_the_step() -> None:
    assert column([made("ring", 1.0, placement="after-step")], "mode") == ["ring (after step)"]


def test_a_column_of_one_character_is_markdown() -> None:
    assert format_table(["mode", "n"], [["ring", "8"]]).splitlines()[1] == "| ---- | --: |"


def test_a_cell_stays_one_cell_whatever_is_in_it() -> None:
    lines = format_table(["mode", "a|b"], [["ring|after", "two\nlines"]]).splitlines()
    assert [line.replace("\\|", "").count("|") for line in lines] == [3, 3, 3]
    assert "ring\\|after" in lines[2] and "two lines" in lines[2]


def test_a_row_says_how_many_steps_were_left_out_and_why() -> None:
    faulted = made("ring", 1.0, counted=8).model_copy(update={"left_out_steps": 12, "left_out_reason": "rate fault"})
    assert column([faulted, made("tree", 1.0)], "note") == ["12 of 20 steps left out: rate fault", "-"]
    assert "note" not in table([made("tree", 1.0)])[0]


def test_a_run_whose_every_step_was_left_out_has_no_figure() -> None:
    nothing = {"left_out_steps": 20, "left_out_reason": "rate fault", "seconds_per_step": None, "steps": 0}
    summaries = [made("single", 2.0), made("ring", 1.0).model_copy(update=nothing)]
    assert column(summaries, "s/iter") == ["2.000", "-"] and column(summaries, "speed-up") == ["1.00", "-"]
    assert column(summaries, "note")[1] == "20 of 20 steps left out: rate fault"


def test_the_text_is_aligned_and_markdown() -> None:
    lines = format_table(*table([made("single", 2.0), made("ring/bucket:5MiB", 1.0)])).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].strip("| -:") == ""
    assert [cell.strip() for cell in lines[3].split("|")][1:4] == ["ring/bucket:5MiB", "1.000", "-"]


# --- what varies has a column ------------------------------------------------------------------------------------


def sweep_of_lr() -> list[Summary]:
    """lr x mode: a single run takes 2 s with lr 0.1 and 3 s with lr 0.2."""
    times = {(0.1, "single"): 2.0, (0.1, "ring"): 1.0, (0.2, "single"): 3.0, (0.2, "ring"): 2.0}
    return [made(mode, seconds, optimizer={"lr": lr}) for (lr, mode), seconds in times.items()]


def test_a_sweep_over_the_learning_rate_shows_it_behind_the_mode() -> None:
    header, rows = table(sweep_of_lr())
    assert header == (HEADER[0], "lr", *HEADER[1:])
    assert [row[:2] for row in rows] == [("single", "0.1"), ("ring", "0.1"), ("single", "0.2"), ("ring", "0.2")]


def test_a_sweeps_speed_up_is_over_the_single_run_with_the_same_learning_rate() -> None:
    assert column(sweep_of_lr(), "speed-up") == ["1.00", "2.00", "1.00", "1.50"]


def test_keys_of_one_last_name_are_told_apart() -> None:
    header, _ = table([made("ring", 1.0), made("ring", 1.0, warmup=1, optimizer={"warmup": 3})])
    assert {"warmup", "optimizer.warmup"} <= set(header)


def test_names_ports_and_deadlines_are_no_column() -> None:
    header, _ = table([made("ring", 1.0), made("ring", 1.0, port=4000, deadline=9.0, probe=False, experiment="e")])
    assert header == HEADER


XEON = {"cpu": "Xeon", "cores": 2, "host": "node0"}


def test_where_runs_of_two_substrates_or_machines_were_measured_has_a_column() -> None:
    summaries = [made("ring", 1.0, environment=XEON), made("tree", 1.0, substrate="compose", environment=XEON)]
    assert column(summaries, "on") == ["netns", "compose"] and "machine" not in table(summaries)[0]
    assert " on netns and compose; " in caption(summaries)
    moved = [summaries[0], made("tree", 1.0, environment=XEON | {"cpu": "Epyc", "host": "node1"})]
    assert column(moved, "machine") == ["Xeon (2 cores)", "Epyc (2 cores)"] and "on" not in table(moved)[0]
    other_name = [summaries[0], made("tree", 1.0, environment=XEON | {"host": "another container"})]
    assert table(other_name)[0] == HEADER


def test_speed_up_is_over_a_single_run_of_the_same_machine() -> None:
    elsewhere = made("single", 100.0, environment=XEON | {"cpu": "Epyc"})
    summaries = [elsewhere, made("single", 2.0, environment=XEON), made("ring", 1.0, environment=XEON)]
    assert column(summaries, "speed-up") == ["1.00", "1.00", "2.00"]


def test_a_run_that_is_left_out_makes_no_column() -> None:
    header, _ = table([made("ring", 1.0), made("ring", 1.0, seed=5, status="failed")])
    assert header == HEADER


# --- the baseline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"model": "vgg11"}, {"batch": 16}, {"substrate": "process"}, {"node": {"cpus": 0.4}}, {"threads": 2}, {"seed": 3}],
    ids=str,
)
def test_speed_up_is_over_the_single_run_under_the_same_conditions(other: dict[str, Any]) -> None:
    summaries = [made("single", 100.0, **other), made("single", 2.0), made("ring", 0.8)]
    assert column(summaries, "speed-up") == ["1.00", "1.00", "2.50"]
    assert column([summaries[0], summaries[2]], "speed-up") == ["1.00", "-"]


@pytest.mark.parametrize(
    "own",
    [
        {"nodes": 4},
        {"link": {"rate": "10mbit"}},
        {"overrides": {"node1": {"link": {"rate": "10mbit"}}}},
        {"batch_per_rank": 4},
        {"batchnorm": "local"},
        {"evaluate": "every-rank"},
        {"data": {"name": "synthetic", "shares": [3, 5]}},
    ],
    ids=str,
)
def test_the_network_and_the_number_of_nodes_are_not_the_baselines(own: dict[str, Any]) -> None:
    assert column([made("single", 2.0), made("ring", 0.8, **own)], "speed-up") == ["1.00", "2.50"]


def test_without_a_baseline_no_speed_up_is_claimed() -> None:
    assert column([made("ring", 0.8)], "speed-up") == ["-"]
    assert column([made("single", 2.0, status="failed"), made("ring", 0.8)], "speed-up") == ["-"]


def test_nodes_that_share_one_processor_have_no_speed_up_over_a_node_that_had_it_alone() -> None:
    def speed_ups(cores: int, **own: Any) -> list[str]:
        single = made("single", 2.0, machines=[{"ranks": [0], "cores": cores, "others": None}], **own)
        ring = made("ring", 0.8, machines=[{"ranks": [0, 1], "cores": cores, "others": None}], **own)
        return column([single, ring], "speed-up")

    assert speed_ups(1) == ["1.00", "-"]
    assert speed_ups(1, node={"cpus": 0.4}) == ["1.00", "2.50"] == speed_ups(2)
    alone = [{"ranks": [rank], "cores": 1, "others": None} for rank in range(2)]
    assert column([made("single", 2.0), made("ring", 0.8, machines=alone)], "speed-up") == ["1.00", "2.50"]


# --- the caption -------------------------------------------------------------------------------------------------


def test_the_caption_says_what_all_rows_share() -> None:
    assert caption([made("ring", 1.0, link={"rate": "200mbit"}, node={"cpus": 0.4})]) == (
        "lenet5, synthetic, batch 8 over all ranks, 2 equal nodes, 0.4 cores each, 1 thread each, 200mbit each way, "
        "on netns; median of 4 steps after 2 left out"
    )
    assert "batch 4 per rank" in caption([made("ring", 1.0, batch_per_rank=4)])
    assert "no CPU limit" in caption([made("ring", 1.0)]) and "unshaped" in caption([made("ring", 1.0)])


def test_the_caption_of_single_alone_speaks_of_one_node_and_of_no_network() -> None:
    """`MODE=single docker compose up` starts four nodes, of which one trains."""
    single = made("single", 1.0, nodes=4, link={"rate": "1gbit"}, node={"cpus": 0.4})
    assert caption([single]) == (
        "lenet5, synthetic, batch 8, 1 node, 0.4 cores, 1 thread, on netns; median of 4 steps after 2 left out"
    )
    ring = made("ring", 1.0, nodes=4, link={"rate": "1gbit"}, node={"cpus": 0.4})
    assert "4 equal nodes, 0.4 cores each, 1 thread each, 1gbit each way" in caption([single, ring])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "vgg11"}, "lenet5"),
        ({"data": {"name": "mnist"}}, "synthetic"),
        ({"batch": 16}, "batch"),
        ({"nodes": 4}, "nodes"),
        ({"node": {"cpus": 0.4}}, "CPU"),
        ({"threads": 2}, "thread"),
        ({"link": {"rate": "200mbit"}}, "unshaped"),
    ],
    ids=str,
)
def test_the_caption_is_silent_about_what_varies(changed: dict[str, Any], words: str) -> None:
    plain = made("ring", 1.0)
    assert words in caption([plain])
    assert words not in caption([plain, made("ring", 1.0, **changed)])


def test_the_caption_is_silent_about_a_batch_per_rank_that_varies() -> None:
    assert "batch" not in caption([made("ring", 1.0, batch_per_rank=size) for size in (4, 8)])


def test_the_caption_is_silent_about_a_number_of_steps_that_varies() -> None:
    text = caption([made("ring", 1.0, counted=4), made("ring", 1.0, steps=12, counted=10)])
    assert text.endswith("median of 4 to 10 steps after 2 left out")
    text = caption([made("ring", 1.0, counted=4), made("ring", 1.0, warmup=1, counted=5)])
    assert text.endswith("median of 4 to 5 steps after warm-up")


SLOW = {"node1": {"cpus": 0.1}}


def test_overrides_make_nodes_unequal() -> None:
    assert "2 unequal nodes" in caption([made("ring", 1.0, overrides=SLOW)])


def test_where_only_some_runs_have_overrides_the_caption_does_not_judge() -> None:
    text = caption([made("ring", 1.0), made("ring", 1.0, overrides=SLOW)])
    assert "equal" not in text and "2 nodes" in text


def test_the_results_are_the_table_its_footnotes_its_notes_and_what_it_leaves_out() -> None:
    slow = made("ring", 2.0, status="invalid", reason="network: off")
    counted = made("none", 1.0)
    noted = counted.model_copy(update={"notes": ["not pinned"], "network": "network: 2 links measured"})
    lines = format_results([noted, noted, slow], "runs/x").splitlines()
    assert any(line.startswith("| mode ") for line in lines)
    after = lines[lines.index("") :] if "" in lines else lines
    tail = [line for line in after if line and not line.startswith("|")][1:]  # the first is the caption
    assert tail[0].startswith("note: none: ") and tail[1:] == [
        "note: not pinned",
        "left out: ring-n2: invalid, network: off (2.000 s/iter)",
        *["none-n2: network: 2 links measured"] * 2,
        "all files are in runs/x",
    ]


def test_results_without_a_counted_run_have_no_table() -> None:
    failed = made("ring", 2.0, status="failed", reason="rank 1 died")
    assert format_results([failed], "runs/x").splitlines() == [
        "left out: ring-n2: failed, rank 1 died",
        "all files are in runs/x",
    ]


def test_the_caption_of_a_script_has_its_command_and_the_batch_that_was_observed(tmp_path: Path) -> None:
    text = caption([make_script_run(tmp_path / "s", Script(images=7))])
    assert text == (
        "python main.py --rank {rank} --world {world}, batches of 7 per rank (observed), 4 equal nodes, "
        "no CPU limit, 1 thread each, 200mbit each way, on netns; median of 10 steps after 2 left out"
    )


def test_defaults_of_our_loop_are_not_shown_for_a_script(tmp_path: Path) -> None:
    text = format_results([make_script_run(tmp_path / "s")], "x")
    assert not [word for word in ("vgg11", "cifar10", "batch 1", "256") if word in text]
    assert "| main.py |" in text


def test_a_script_beside_our_own_mode_has_no_columns_for_what_only_one_of_them_has(tmp_path: Path) -> None:
    own = make_run(tmp_path / "ring", mode="ring", link={"rate": "200mbit"})
    header, rows = table([own, make_script_run(tmp_path / "s")])
    assert header == HEADER and [row[0] for row in rows] == ["ring", "main.py"]
    text = caption([own, make_script_run(tmp_path / "t")])
    assert text.startswith("vgg11, cifar10, batch 64 over all ranks, python main.py")


def test_two_commands_of_a_script_have_a_column(tmp_path: Path) -> None:
    both = [
        make_script_run(tmp_path / str(lr), script={"argv": ["python", "main.py", "--lr", lr], "folder": "/x"})
        for lr in ("1", "2")
    ]
    header, rows = table(both)
    assert header[1] == "argv" and [row[1] for row in rows] == ["python main.py --lr 1", "python main.py --lr 2"]


def test_emulated_compute_and_time_dilation_are_named() -> None:
    keys = {"mode": "ring", "batch_per_rank": 24, "compute": "emulated:p.json"}
    runs = [
        Summary(spec=RunSpec.load(keys | {"nodes": nodes, "dilation": slower}, "case"), status="ok", substrate="netns")
        for nodes, slower in ((4, 1.0), (32, 2.5))
    ]
    text = format_results(runs, "runs/x")
    assert "vgg11 (emulated compute)" in text and "cifar10" not in text
    assert "measured 2.5 times slower |" in text and "dilation" not in text
    assert "note: emulated compute: " in text and "all figures are divided by K" in text
