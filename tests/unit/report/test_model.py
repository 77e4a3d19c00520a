"""Cells, chapters and curves: what is pooled, what is sorted, and that the parts of a step add up in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import Cell, chapters, comparable, crossings, names
from tests.support.synthetic import Conditions, make_run, size_of

MODES = ["single", "none", "gather", "allreduce", "ring", "ddp", "server", "ddp/fp16", "direct/topk:0.01"]
MODES += ["ring/bucket:2MiB/overlap", "ring/bucket:2MiB/pipeline", "direct/bucket:2MiB/overlap/int8"]


def cell_of(folder: Path, made: Conditions | None = None, **values: Any) -> Cell:
    make_run(folder, made, **values)
    return chapters(load([folder]))[0].cells[0]


@pytest.mark.parametrize("copies", [0.0, 0.05])
@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_in_every_mode(tmp_path: Path, mode: str, copies: float) -> None:
    cell = cell_of(tmp_path / "run", Conditions(copies=copies), mode=mode, link={"rate": "500mbit"})
    assert cell.split.step_gap < 0.001 and cell.split.busy_gap < 0.001
    assert cell.split.copies == pytest.approx(0.0 if cell.spec.mode.silent else copies)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("single", "none")])
def test_every_buffer_counts_once_in_s(tmp_path: Path, mode: str) -> None:
    """If the second half of a synchronisation counted as well, S would double, and bytes over theory would halve."""
    cell = cell_of(tmp_path / "run", Conditions(buckets=4), mode=mode, link={"rate": "500mbit"})
    count, size = cell.buffers
    assert count == 4 and size == pytest.approx(size_of(cell.spec), abs=4)
    ratio = cell.sent_over_theory()
    assert ratio is not None and 1.0 < ratio < 1.06
    assert cell.bound is not None and cell.split.busy >= cell.bound


def test_only_a_mode_that_overlaps_hides_communication(tmp_path: Path) -> None:
    shares = {m: cell_of(tmp_path / m, mode=m, link={"rate": "500mbit"}).split.hidden_share for m in ("ring", "ddp")}
    assert shares["ring"] == pytest.approx(0.0, abs=1e-6)
    assert shares["ddp"] is not None and shares["ddp"] > 0.05


def test_warm_up_steps_do_not_count(tmp_path: Path) -> None:
    cell = cell_of(tmp_path / "run", mode="ring", steps=12, warmup=5)
    assert cell.seconds.n == 7 and cell.steps[0].step[0] == 5


def test_repeats_are_pooled(tmp_path: Path) -> None:
    for repeat in range(3):
        make_run(tmp_path / f"ring-r{repeat}", Conditions(seed=repeat), mode="ring")
    (chapter,) = chapters(load([tmp_path]))
    (cell,) = chapter.cells
    assert (len(cell.runs), cell.seconds.n) == (3, 30)


def test_runs_of_another_mode_substrate_machine_or_spans_are_not_repeats(tmp_path: Path) -> None:
    make_run(tmp_path / "a", mode="ring")
    make_run(tmp_path / "b", mode="ddp")
    make_run(tmp_path / "c", Conditions(substrate="compose"), mode="ring")
    make_run(tmp_path / "d", mode="ring", spans=False)
    make_run(tmp_path / "e", Conditions(cpu_model="Epyc"), mode="ring")
    assert len(chapters(load([tmp_path]))[0].cells) == 5


def test_a_name_says_where_a_run_was_measured_even_if_its_mode_is_unique(tmp_path: Path) -> None:
    make_run(tmp_path / "a", mode="ring", link={"rate": "500mbit"})
    make_run(tmp_path / "b", Conditions(substrate="compose"), mode="ddp", link={"rate": "100mbit"}, batch=32)
    (chapter,) = chapters(load([tmp_path]))
    assert names(chapter.cells) == ["ring on netns, 500mbit", "ddp on compose, 100mbit"]


def test_only_cells_that_differ_in_their_mode_are_comparable(tmp_path: Path) -> None:
    for mode in ("ring", "ddp", "tree"):
        make_run(tmp_path / f"{mode}-4", mode=mode, steps=4)
    for mode in ("ring", "ddp"):
        make_run(tmp_path / f"{mode}-2", mode=mode, nodes=2, steps=4)
        make_run(tmp_path / f"{mode}-there", Conditions(substrate="compose"), mode=mode, steps=4)
    slow = {"node2": {"cpus": 0.1}}
    for mode in ("ring", "ddp", "tree", "gather"):
        make_run(tmp_path / f"{mode}-slow", mode=mode, overrides=slow, steps=4)
    (chapter,) = chapters(load([tmp_path]))
    assert {cell.spec.name for cell in comparable(chapter)} == {"ring-4", "ddp-4", "tree-4"}


def test_cells_are_sorted_by_the_number_of_nodes(tmp_path: Path) -> None:
    for nodes in (16, 2, 4):
        make_run(tmp_path / f"ring-{nodes}", mode="ring", nodes=nodes, steps=4)
    (chapter,) = chapters(load([tmp_path]))
    assert [cell.world for cell in chapter.cells] == [2, 4, 16]


def test_crossing_of_two_lines_on_logarithmic_axes() -> None:
    lines = [[(1e7, 4.0), (1e9, 1.0)], [(1e7, 2.0), (1e9, 2.0)]]
    (met,) = crossings(["a", "b"], lines)
    assert met.at == pytest.approx(1e8) and (met.left, met.right) == ("b", "a")
