"""Sweeps: every cell is run, failures do not end the sweep, and only finished runs are skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.runs.locks import folder_lock
from testbed.control.runs.progress import Silent
from testbed.control.runs.select import SubstrateChoice
from testbed.control.runs.sweep import finished, run_all
from testbed.control.substrates.fake import FakeSubstrate
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.spec.errors import CommandFailed, Interrupted, NetworkInvalid, RankFailed, SpecError
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import BAD, GOOD, FakeRuns, fails_with, finishes_while_waiting, succeeds

FILE = """
title = "three modes"
[base]
model = "lenet5"
data = { name = "synthetic" }
nodes = 2
batch = 8
steps = 6
link = { rate = "200mbit" }
[axes]
mode = ["single", "ring", "tree"]
"""


@pytest.fixture
def fake() -> FakeRuns:
    fake = FakeRuns()
    fake.receipts = itertools.repeat(GOOD)
    return fake


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_RUNS", raising=False)
    path = tmp_path / "three.toml"
    path.write_text(FILE)
    return path


def specs(file: Path, **base: object) -> list[RunSpec]:
    experiment = Experiment.read(file)
    return experiment.model_copy(update={"base": experiment.base | base}).runs()


def command(fake: FakeRuns, file: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main.app, ["sweep", str(file), "--on", "fake", *arguments], obj={"fake": fake.type})


def fails_in(mode: str) -> object:
    def play(folder: RunFolder, rank: int) -> int | None:
        failed = str(folder.read_spec().mode) == mode
        return (fails_with(1, "no luck") if failed else succeeds)(folder, rank)

    return play


def test_a_sweep_continues_after_a_run_that_failed(fake: FakeRuns, file: Path) -> None:
    fake.play = fails_in("ring")
    summaries, errors = run_all(specs(file), fake.choice, Path("runs"), Silent())
    assert [s.status for s in summaries] == ["ok", "failed", "ok"]
    assert len(errors) == 1 and isinstance(errors[0], RankFailed) and "no luck" in str(errors[0])


def test_ctrl_c_ends_a_sweep_even_if_the_clean_up_fails(fake: FakeRuns, file: Path) -> None:
    class Stuck(FakeSubstrate):
        def __exit__(self, *exception: object) -> None:
            raise CommandFailed("docker compose down: no such engine", 1, "")

    def interrupt(node: int, argv: object, log: Path) -> int:
        raise KeyboardInterrupt

    def make(spec: RunSpec, folder: Path) -> FakeSubstrate:
        fake.made.append(Stuck(spec.world, interrupt))
        return fake.made[-1]

    choice = SubstrateChoice(replace(fake.type, make=make), "for tests")
    with pytest.raises(Interrupted, match=r"runs/three/single.*no such engine.*testbed clean"):
        run_all(specs(file)[:2], choice, Path("runs"), Silent())
    assert len(fake.made) == 1
    assert Summary.read(RunFolder(Path("runs/three/single"))).status == "interrupted"


def test_ctrl_c_while_nodes_are_made_ends_a_sweep_even_if_removing_them_fails(fake: FakeRuns, file: Path) -> None:
    class Stuck(FakeSubstrate):
        def __enter__(self) -> FakeSubstrate:
            try:
                raise KeyboardInterrupt
            finally:
                raise CommandFailed("docker compose down: no such engine", 1, "")

    def make(spec: RunSpec, folder: Path) -> FakeSubstrate:
        fake.made.append(Stuck(spec.world, fake.play))
        return fake.made[-1]

    choice = SubstrateChoice(replace(fake.type, make=make), "for tests")
    with pytest.raises(Interrupted, match=r"interrupted.*no such engine"):
        run_all(specs(file)[:2], choice, Path("runs"), Silent())
    assert len(fake.made) == 1


def test_the_command_ends_with_the_first_errors_code_and_prints_the_table_first(fake: FakeRuns, file: Path) -> None:
    fake.play = fails_in("ring")
    result = command(fake, file)
    assert isinstance(result.exception, RankFailed)
    assert "| single" in result.stdout and "| tree" in result.stdout and "| ring" not in result.stdout
    assert "left out: ring: failed" in result.stdout


def test_a_sweep_runs_again_only_what_did_not_end_well(fake: FakeRuns, file: Path) -> None:
    fake.play = fails_in("ring")
    run_all(specs(file), fake.choice, Path("runs"), Silent())
    fake.play, before = succeeds, len(fake.made)
    summaries, errors = run_all(specs(file), fake.choice, Path("runs"), Silent())
    assert [s.status for s in summaries] == ["ok", "ok", "ok"] and errors == []
    assert len(fake.made) - before == 1
    aside = RunFolder(Path("runs/three/.superseded/ring~0"))
    assert Summary.read(aside).status == "failed"


def test_machine_and_nodes_are_held_once_from_the_first_run_that_is_not_skipped(fake: FakeRuns, file: Path) -> None:
    held: list[str] = []

    @contextmanager
    def hold(what: str) -> Iterator[None]:
        held.append(what)
        yield
        held.append(f"no {what}")

    choice = replace(fake.choice, type=replace(fake.type, reserve=lambda report: hold("nodes")))
    run_all(specs(file)[:1], fake.choice, Path("runs"), Silent())

    def sweep() -> None:
        run_all(specs(file), choice, Path("runs"), Silent(), lock=lambda choice, report: hold("lock"))

    sweep()
    assert held[:2] == ["lock", "nodes"] and held.count("nodes") == 1 and held[-2:] == ["no nodes", "no lock"]
    held.clear()
    sweep()
    assert held == [], "every run was skipped"


def test_fresh_runs_everything_again_and_sets_the_old_aside(fake: FakeRuns, file: Path) -> None:
    for _ in range(2):
        assert command(fake, file, "--fresh").exit_code == 0
    assert len(fake.made) == 6
    assert sorted(path.name for path in Path("runs/three/.superseded").iterdir()) == ["ring~0", "single~0", "tree~0"]


def test_another_spec_is_another_run(fake: FakeRuns, file: Path) -> None:
    run_all(specs(file), fake.choice, Path("runs"), Silent())
    run_all(specs(file, seed=1), fake.choice, Path("runs"), Silent())
    assert len(fake.made) == 6
    assert {path.name for path in Path("runs/three").iterdir()} == {".superseded", "single", "ring", "tree"}


def other(fake: FakeRuns) -> SubstrateChoice:
    return SubstrateChoice(fake.named("other"), "for tests")


def test_only_the_same_spec_on_the_same_substrate_is_finished(fake: FakeRuns, file: Path) -> None:
    unshaped = SubstrateChoice(fake.named("fake", shapes=False, drop_unsupported=RunSpec.without_shaping), "for tests")
    _, ring, _ = specs(file)
    run_all([ring], fake.choice, Path("runs"), Silent())
    folder = RunFolder(Path("runs/three/ring"))
    assert finished(folder, ring, fake.choice) == Summary.read(folder)
    assert finished(folder, ring, other(fake)) is None
    assert finished(folder, ring, unshaped) is None
    assert finished(folder, specs(file, seed=1)[1], fake.choice) is None
    folder.summary.write_text("{")
    assert finished(folder, ring, fake.choice) is None


def test_a_report_that_fails_changes_neither_the_table_nor_the_exit_code(
    fake: FakeRuns, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr("testbed.report.page.write", breaks)
    result = command(fake, file)
    assert result.exit_code == 0, result.exception
    table, told = result.stdout.index("| tree"), result.stdout.index("no report: ZeroDivisionError: nobody thought")
    assert table < told


def test_what_another_substrate_finished_stays(fake: FakeRuns, file: Path) -> None:
    for choice in (fake.choice, other(fake), fake.choice, other(fake)):
        summaries, errors = run_all(specs(file), choice, Path("runs"), Silent())
        assert [s.status for s in summaries] == ["ok"] * 3 and errors == []
    assert len(fake.made) == 6
    names = ["ring", "ring@other", "single", "single@other", "tree", "tree@other"]
    assert sorted(path.name for path in Path("runs/three").iterdir()) == names
    run_all(specs(file), other(fake), Path("runs"), Silent(), fresh=True)
    aside = sorted(path.name for path in Path("runs/three/.superseded").iterdir())
    assert aside == ["ring@other~0", "single@other~0", "tree@other~0"]


def test_a_run_that_failed_on_another_substrate_is_set_aside(fake: FakeRuns, file: Path) -> None:
    fake.play = fails_in("ring")
    run_all(specs(file), fake.choice, Path("runs"), Silent())
    fake.play = succeeds
    run_all(specs(file), other(fake), Path("runs"), Silent())
    assert Summary.read(RunFolder(Path("runs/three/ring"))).status == "ok"
    assert not Path("runs/three/ring@other").exists() and Path("runs/three/tree@other").exists()


def test_a_setting_on_an_axis_is_refused_and_nothing_runs(fake: FakeRuns, file: Path) -> None:
    result = command(fake, file, "--set", "mode=tree")
    assert isinstance(result.exception, SpecError)
    assert str(result.exception).startswith("--set mode:") and str(file) in str(result.exception)
    assert fake.made == [] and not Path("runs").exists()


def test_a_setting_that_is_not_an_axis_applies_to_every_run(fake: FakeRuns, file: Path) -> None:
    assert command(fake, file, "--set", "optimizer.lr=0.5").exit_code == 0
    found = [Summary.read(RunFolder(path.parent)) for path in Path("runs/three").glob("*/spec.json")]
    assert [summary.spec.optimizer.lr for summary in found] == [0.5] * 3


def test_a_sweep_of_invalid_runs_ends_with_5_and_shows_no_numbers_of_them(fake: FakeRuns, file: Path) -> None:
    fake.receipts = itertools.repeat(BAD)
    result = command(fake, file)
    assert result.exit_code == NetworkInvalid.exit_code, result.output
    assert "| single" in result.stdout and "| ring" not in result.stdout
    assert f"left out: ring: invalid, {BAD.sentence()}" in result.stdout


def test_with_keep_going_invalid_runs_are_trained_and_finished_ones_are_skipped(fake: FakeRuns, file: Path) -> None:
    assert command(fake, file).exit_code == 0
    made = len(fake.made)
    fake.receipts = itertools.repeat(BAD)
    assert command(fake, file, "--keep-going").exit_code == 0
    assert len(fake.made) == made  # nothing was run again
    result = command(fake, file, "--keep-going", "--fresh")
    assert result.exit_code == 5 and len(fake.made) > made
    ring = Summary.read(RunFolder(Path("runs/three/ring")))
    assert (ring.status, ring.spec.keep_going, ring.steps > 0) == ("invalid", True, True)


def test_a_sweep_of_good_runs_ends_with_0_and_a_report(fake: FakeRuns, file: Path) -> None:
    result = command(fake, file)
    assert result.exit_code == 0, result.output
    assert "report: runs/three/report.html" in result.stdout and Path("runs/three/report.html").is_file()
    assert "left out:" not in result.stdout


def failed_ring(fake: FakeRuns, file: Path) -> tuple[RunSpec, RunFolder]:
    _, ring, _ = specs(file)
    fake.play = fails_in("ring")
    run_all([ring], fake.choice, Path("runs"), Silent())
    fake.play = succeeds
    return ring, RunFolder(Path("runs/three/ring"))


def test_a_run_that_another_process_finished_while_we_waited_is_not_set_aside(fake: FakeRuns, file: Path) -> None:
    ring, folder = failed_ring(fake, file)
    lock = finishes_while_waiting(folder)
    (summary,), errors = run_all([ring], fake.choice, Path("runs"), Silent(), lock=lock)
    assert summary == Summary.read(folder) and summary.status == "ok" and errors == []
    assert len(fake.made) == 1 and [path.name for path in Path("runs/three").iterdir()] == ["ring"]


def test_a_run_that_another_substrate_finished_while_we_waited_stays(fake: FakeRuns, file: Path) -> None:
    ring, folder = failed_ring(fake, file)
    lock = finishes_while_waiting(folder, substrate="other")
    run_all([ring], fake.choice, Path("runs"), Silent(), lock=lock)
    assert Summary.read(folder).substrate == "other"
    assert sorted(path.name for path in Path("runs/three").iterdir()) == ["ring", "ring@fake"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_another_process_uses_is_not_set_aside(fake: FakeRuns, file: Path, fresh: bool) -> None:
    ring, folder = failed_ring(fake, file)
    with folder_lock(folder.path):
        _, (error,) = run_all([ring], fake.choice, Path("runs"), Silent(), fresh)
    assert "in use by process" in str(error) and folder.path.is_dir() and not Path("runs/three/.superseded").exists()
