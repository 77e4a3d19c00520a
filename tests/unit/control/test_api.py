"""The Python API on a fake substrate: what run, sweep and load return, refuse and count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed.control import api
from testbed.control.api import Run, Runs
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.spec.errors import RankFailed, SpecError, TestbedError, UsageError
from testbed.spec.experiment import spec_from_flags
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import BAD, GOOD, FakeRuns, fails_with, succeeds

SMALL: dict[str, Any] = {"nodes": 2, "model": "lenet5", "data": "synthetic", "batch": 8, "steps": 6, "rate": "200mbit"}
EXPERIMENT = {
    "name": "three",
    "title": "three modes",
    "base": {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": 6},
    "axes": {"mode": ["single", "ring", "tree"]},
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_RUNS", raising=False)
    fake = FakeRuns()
    fake.receipts = itertools.repeat(GOOD)
    return fake


def run(fake: FakeRuns, **keys: Any) -> Run:
    return testbed.run(on=fake.type, quiet=True, **SMALL | keys)


def test_a_run_has_what_was_requested_and_what_was_measured(fake: FakeRuns) -> None:
    made = run(fake, mode="ring")
    assert made.summary.status == "ok" and made.spec.link.rate == 200_000_000
    assert made.receipt == GOOD
    assert made.folder.parent == Path("runs/adhoc") and RunFolder(made.folder).read_spec() == made.spec
    assert testbed.load(made.folder) == Run(made.folder)


def test_steps_are_columns_of_equal_length_with_a_row_per_step_and_rank(fake: FakeRuns) -> None:
    steps = run(fake).steps
    assert {len(column) for column in steps.values()} == {2 * 6}
    assert steps["rank"] == [0] * 6 + [1] * 6 and steps["step"] == [*range(6), *range(6)]
    assert set(steps["loss"]) == {2.0} and steps["sent"][5] == 500
    assert set(steps.pop("evaluated")) == {""}, "a line of a script"
    assert all(isinstance(value, int | float | None) for column in steps.values() for value in column)


def test_keys_are_those_of_the_spec_and_the_flags(fake: FakeRuns) -> None:
    made = run(fake, rate=None, link={"rate": "200mbit", "queue": "20ms"}, optimizer={"lr": 0.5}, settings=["seed=3"])
    assert (made.spec.link.rate, made.spec.optimizer.lr, made.spec.seed) == (200_000_000, 0.5, 3)
    table = spec_from_flags({"data": {"name": "mnist", "subset": 512}, "rate": "1mbit", "link": {"delay": "1ms"}})
    assert (table.data.name, table.data.subset, table.link.rate, table.link.delay) == ("mnist", 512, 1_000_000, 0.001)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mode": "rong"}, "^mode='rong': unknown algorithm"),
        ({"nodes": 1}, r"^nodes=1: mode ring needs at least 2\. Use mode='single', or nodes=2\.$"),
        ({"optimizer": {"lr": -1}}, r"^optimizer\.lr=-1: must be greater than 0\. Write e\.g\. optimizer\.lr=0\.02\.$"),
        ({"stepz": 4}, "'stepz'"),
        ({"on": "moon"}, "'moon'"),
        ({"on": "process"}, "cannot be shaped"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_created(
    fake: FakeRuns, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        testbed.run(**{"on": fake.type, "quiet": True} | SMALL | keys)
    assert list(Path().iterdir()) == []


def test_a_run_that_fails_raises_and_its_folder_can_be_loaded(fake: FakeRuns) -> None:
    fake.play = fails_with(3, "boom")
    with pytest.raises(RankFailed, match="boom"):
        run(fake, out="r")
    failed = testbed.load("r")
    assert isinstance(failed, Run) and failed.summary.status == "failed"
    assert "boom" in failed._repr_html_()
    fake.play = succeeds
    assert api.resume("r", on=fake.type, quiet=True).summary.status == "ok"


def test_a_network_that_is_off_is_a_result_with_the_status_invalid(fake: FakeRuns) -> None:
    fake.receipts = itertools.repeat(BAD)
    assert run(fake).summary.status == "invalid"


def test_a_sweep_returns_all_runs_and_finished_ones_are_not_run_again(fake: FakeRuns) -> None:
    fake.receipts = itertools.repeat(GOOD)
    settings = ["link.rate=200mbit"]
    runs = testbed.sweep(EXPERIMENT, on=fake.type, quiet=True, settings=settings)
    assert [str(each.spec.mode) for each in runs] == ["single", "ring", "tree"] and len(fake.made) == 3
    assert [row["mode"] for row in runs.table] == ["single", "ring", "tree"]
    again = testbed.sweep(EXPERIMENT, on=fake.type, quiet=True, settings=settings)
    assert again == runs and len(fake.made) == 3
    loaded = testbed.load("runs/three")
    assert isinstance(loaded, Runs) and {each.folder for each in loaded} == {each.folder for each in runs}
    assert sorted(s.spec.name for s in loaded.summaries) == ["ring", "single", "tree"]


def test_a_run_that_fails_does_not_end_a_sweep(fake: FakeRuns) -> None:
    def fail_in_ring(folder: RunFolder, rank: int) -> int | None:
        failed = str(folder.read_spec().mode) == "ring"
        return (fails_with(1, "no luck") if failed else succeeds)(folder, rank)

    fake.play = fail_in_ring
    runs = testbed.sweep(EXPERIMENT, on=fake.type, quiet=True, settings=["probe=false"])
    assert [s.status for s in runs.summaries] == ["ok", "failed", "ok"]
    (error,) = runs.errors
    assert isinstance(error, TestbedError) and "no luck" in str(error)
    assert "<td>tree</td>" in runs._repr_html_() and "<p>ring: failed, " in runs._repr_html_()


def test_a_notebook_shows_a_table_and_other_peoples_text_is_escaped(fake: FakeRuns) -> None:
    made = run(fake)
    assert "<table>" in made._repr_html_() and "<td>ring</td>" in made._repr_html_()
    summary = made.summary.model_copy(update={"status": "failed", "reason": "<script>"})
    assert "<script>" not in Run(made.folder, summary)._repr_html_()


def test_figures_are_drawn_by_name_and_unknown_ones_refused_with_those_that_exist(fake: FakeRuns) -> None:
    made = run(fake)
    assert made.figure("loss-by-iteration").svg.startswith("<?xml")
    assert made.figure("step")._repr_svg_() == made.figure("where-time-goes").svg
    with pytest.raises(SpecError, match=r"figure 'spiral': .*Known: .*step"):
        made.figure("spiral")


def test_a_folder_without_runs_is_refused(fake: FakeRuns) -> None:
    for path in (".", "nowhere"):
        with pytest.raises(UsageError, match=r"contains no run folder|no such folder"):
            testbed.load(path)


def test_folders_that_a_sweep_has_set_aside_are_not_loaded(fake: FakeRuns) -> None:
    for _ in range(2):
        testbed.sweep(EXPERIMENT, on=fake.type, quiet=True, fresh=True, settings=["probe=false"])
    loaded = testbed.load("runs")
    assert isinstance(loaded, Runs) and len(loaded) == 3


def test_for_one_run_the_spec_is_parsed_once_and_the_substrate_checked_once(
    fake: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    load = RunSpec.load

    def counted(values: dict[str, Any], where: str) -> RunSpec:
        parsed.append(values)
        return load(values, where)

    def play(folder: RunFolder, rank: int) -> int:
        """The ranks parse the spec, too; that is not counted."""
        before = list(parsed)
        code = succeeds(folder, rank)
        parsed[:] = before
        return code

    monkeypatch.setattr(RunSpec, "load", counted)
    fake.play = play
    made = run(fake)
    assert made.summary.status == "ok" and isinstance(made.spec.nodes, int)
    assert len(parsed) == 1 and len(fake.checks) == 1


def test_the_summary_of_a_new_run_is_the_one_on_disk(fake: FakeRuns) -> None:
    made = run(fake)
    assert made.summary == Summary.read(RunFolder(made.folder))
