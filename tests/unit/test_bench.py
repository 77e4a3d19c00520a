"""The bench itself: what it resumes from, what it counts, and from which runs its figures may come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.spec.run import RunSpec
from testbed.spec.summary import Summary
from tests.bench import __main__ as bench
from tests.bench import codecs
from tests.bench.figures import Figure
from tests.provenance import DIRTY, current

SHOWN = Figure(name="shown", value=7.0)
GOOD, POOR = Figure(name="good", value=1.0, high=2.0), Figure(name="poor", value=3.0, high=2.0)
Bench = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """`run_bench("abc", "--resume")`, as of commit abc: the exit code and which parts were measured."""

    def run(commit: str, *arguments: str, **parts: list[Figure]) -> tuple[int, list[str]]:
        measured: list[str] = []

        def measure(part: str) -> list[Figure]:
            measured.append(part)
            return parts[part]

        monkeypatch.setattr(bench, "PARTS", {part: lambda part=part: measure(part) for part in parts})
        monkeypatch.setattr(bench, "code_commit", lambda *_: commit)
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "bench.json"), *arguments])
        return bench.main(), measured

    return run


def test_it_resumes_with_parts_of_the_same_commit_only(run_bench: Bench, tmp_path: Path) -> None:
    assert run_bench("abc", a=[GOOD]) == (0, ["a"])
    assert run_bench("abc", "--resume", a=[GOOD], b=[GOOD]) == (0, ["b"])
    assert run_bench("abc", a=[GOOD], b=[GOOD]) == (0, ["a", "b"])
    assert run_bench("def", "--resume", "a", a=[GOOD], b=[GOOD]) == (0, ["a"])
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert {part: of["commit"] for part, of in kept.items()} == {"a": "def", "b": "abc"}


def test_figures_of_a_tree_with_changes_are_never_resumed_from(run_bench: Bench) -> None:
    for _ in range(2):
        assert run_bench("abc" + DIRTY, "--resume", a=[GOOD]) == (0, ["a"])
    assert current("abc", "abc") and not current("abc", "def")
    assert not current("abc" + DIRTY, "abc" + DIRTY) and not current("", "")


def test_what_has_no_limit_is_no_limit_met(run_bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench("abc", a=[GOOD, SHOWN], b=[POOR]) == (1, ["a", "b"])
    printed = capsys.readouterr().out
    assert "1 of 2 limits met" in printed
    assert "ok    good" in printed and "MISS  poor" in printed
    assert "      shown: 7.000 (no limit)" in printed and "ok    shown" not in printed


def test_a_small_figure_is_not_shown_as_zero() -> None:
    assert ": 2.5e-12 (<= 1e-09)" in str(Figure(name="x", value=2.5e-12, high=1e-9))
    assert ": 0.000 (" in str(Figure(name="x", value=0.0)) and ": -1.250 (" in str(Figure(name="x", value=-1.25))


@pytest.mark.parametrize(("commit", "fresh"), [("abc", False), ("abc" + DIRTY, True)])
def test_codecs_take_finished_runs_of_this_very_commit_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commit: str, fresh: bool
) -> None:
    asked: list[tuple[Path, bool]] = []

    def sweep(specs: Any, place: Any, root: Path, progress: Any, fresh: bool = False) -> tuple[list[Any], list[Any]]:
        asked.append((root, fresh))
        return [], []

    monkeypatch.setenv("TESTBED_RUNS", str(tmp_path))
    monkeypatch.setattr(codecs, "sweep", sweep)
    monkeypatch.setattr(codecs, "code_commit", lambda *_: commit)
    codecs._sweep("codecs", on="process")
    assert asked == [(tmp_path / f"bench-{commit}", fresh)]


def test_a_missing_accuracy_is_not_taken_for_none_right() -> None:
    runs = [
        Summary(spec=RunSpec.load({"mode": mode, "name": mode.replace("/", "-")}, ""), status="ok", test_accuracy=found)
        for mode, found in {"ring": 0.5, "ring/fp16": None}.items()
    ]
    with pytest.raises(SystemExit, match="ring-fp16: nothing was tested"):
        list(codecs.verdict(runs))
