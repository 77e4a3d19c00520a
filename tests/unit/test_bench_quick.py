"""`make bench ARGS=quick`: its exit code, what a slower machine excuses, and what is run again. Nothing is measured."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.results.folder import EXPERIMENT
from testbed.spec.errors import Unavailable, UsageError
from testbed.spec.experiment import Experiment
from tests.bench import __main__ as bench
from tests.bench import measure, quick
from tests.bench.figures import Figure
from tests.support.synthetic import Conditions, make_run

MODES = ("single", "ring", "ddp", "none")
Seconds = dict[str, float]  # of computing a batch, by mode
EQUAL: Seconds = dict.fromkeys(MODES, 4.0)
Quick = Callable[..., tuple[int, list[list[str]]]]


def make_runs(folder: Path, seconds: Seconds, seed: int) -> None:
    for mode, compute in seconds.items():
        conditions = Conditions(compute=compute, seed=seed)
        make_run(folder / mode, conditions, mode=mode, experiment="quick", link={"rate": "500mbit"})
    (folder / EXPERIMENT).write_text(json.dumps({"name": "quick", "title": "t"}))


@pytest.fixture
def run_quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Quick:
    """`run_quick(first, second)` returns the exit code and the modes of each sweep. The committed runs are EQUAL."""
    committed = tmp_path / "committed" / "quick"
    make_runs(committed, EQUAL, seed=1)
    archive = tmp_path / "quick.tar.xz"
    kept = {"commit": "abc", "load": 0.1, "minutes": 5, "substrate": "netns"}
    measure.pack(committed, [committed / mode for mode in MODES], archive, kept)
    monkeypatch.setattr(quick, "ARCHIVE", archive)
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    monkeypatch.setattr(quick, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("TESTBED_RUNS", "")
    monkeypatch.setattr(quick.Experiment, "read", lambda _: experiment)
    experiment = Experiment.load(
        {"name": "quick", "title": "t", "axes": {"mode": list(MODES)}, "base": {"model": "vgg11"}}, ""
    )

    def run(*sweeps: Seconds, limit_met: bool = True) -> tuple[int, list[list[str]]]:
        asked: list[list[str]] = []

        def sweep(wanted: Experiment, on: str, fresh: bool) -> Any:
            assert on == "netns" and fresh
            asked.append([str(spec.mode) for spec in wanted.runs()])
            folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "quick"
            seconds = sweeps[len(asked) - 1]
            make_runs(folder, {mode: seconds[mode] for mode in asked[-1] if mode in seconds}, seed=1 + len(asked))
            return SimpleNamespace(folder=folder)

        figure = Figure(name="loop", value=1.0 if limit_met else 2.0, high=1.05)
        monkeypatch.setattr(quick.api, "sweep", sweep)
        monkeypatch.setattr(quick, "PARTS", {"loop": lambda: iter([figure])})
        monkeypatch.setattr(sys, "argv", ["bench", "quick"])
        return bench.main(), asked

    return run


def test_an_equal_tree_is_not_worse(run_quick: Quick, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_quick(EQUAL) == (0, [list(MODES)])
    assert "quick: not worse than the committed figures" in capsys.readouterr().out


def test_a_mode_that_is_slower_twice_is_a_regression_and_is_named(
    run_quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = EQUAL | {"ddp": 6.0}
    assert run_quick(slow, slow) == (1, [list(MODES), ["ddp", "none"]])
    assert "\nslower: ddp\n" in capsys.readouterr().out


def test_a_mode_that_is_slower_only_once_is_none(run_quick: Quick) -> None:
    assert run_quick(EQUAL | {"ring": 6.0}, EQUAL) == (0, [list(MODES), ["ring", "none"]])


def test_a_slower_machine_is_no_regression(run_quick: Quick) -> None:
    """The control is slower as well. A mode that is slower than the control shows is still found."""
    machine = dict.fromkeys(MODES, 6.0)
    assert run_quick(machine) == (0, [list(MODES)])
    slow = machine | {"ring": 10.0}
    assert run_quick(slow, slow)[0] == 1


def test_a_faster_machine_does_not_make_a_wire_bound_mode_look_slower(run_quick: Quick) -> None:
    assert run_quick(EQUAL | {"none": 2.0, "single": 2.0})[0] == 0


def test_a_missed_limit_or_a_lost_run_is_worse(run_quick: Quick) -> None:
    assert run_quick(EQUAL, limit_met=False)[0] == 1
    assert run_quick({mode: 4.0 for mode in MODES if mode != "ring"}) == (1, [list(MODES)])


def test_without_committed_figures_it_says_how_to_measure_them(
    run_quick: Quick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "ARCHIVE", tmp_path / "none.tar.xz")
    assert run_quick() == (2, [])
    assert "make measure ARGS=quick" in capsys.readouterr().out


@pytest.mark.parametrize("error", [Unavailable("no namespaces here"), RuntimeError("no namespaces here")])
@pytest.mark.parametrize("where", ["part", "sweep"])
def test_a_machine_that_cannot_measure_is_no_regression(
    run_quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, where: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    run_quick(EQUAL)  # it puts the replacements in place
    monkeypatch.setattr(*((quick, "PARTS", {"loop": refuse}) if where == "part" else (quick.api, "sweep", refuse)))
    capsys.readouterr()
    assert quick.main() == 2
    printed = capsys.readouterr().out
    assert "quick: not measured: " in printed and "no namespaces here" in printed and "make measure" not in printed


def test_without_a_run_in_common_it_says_how_to_measure_again(
    run_quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no run of A has the spec of one in B.")

    monkeypatch.setattr(quick, "compare", refuse)
    assert run_quick(EQUAL)[0] == 2
    assert "Measure the committed figures again: make measure ARGS=quick" in capsys.readouterr().out


def test_the_experiment_has_a_control() -> None:
    """Without it a slower machine would be a regression."""
    assert quick.CONTROL in [str(spec.mode) for spec in Experiment.read(quick.EXPERIMENT).runs()]
