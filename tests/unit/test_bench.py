"""The bench itself: what it resumes from, what it counts, what it holds against a limit, and from which runs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from testbed.rank.train import deadline
from testbed.results.conclude import Summary
from testbed.spec.run import RunSpec
from tests.bench import __main__ as bench
from tests.bench import codecs, step, trust
from tests.bench.cases import CONTROL, DDP, DEADLINE, PATIENT, PIPELINE, Ranks, case
from tests.bench.figures import MEASURED, Figure
from tests.support.provenance import DIRTY, ROOT, current

SHOWN = Figure(name="shown", value=7.0)
GOOD, POOR = Figure(name="good", value=1.0, high=2.0), Figure(name="poor", value=3.0, high=2.0)
Bench = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """`run_bench("abc", "--resume")`, as of commit abc: the exit code and which parts were measured."""

    def run(commit: str | Callable[..., str], *arguments: str, **parts: Iterable[Figure]) -> tuple[int, list[str]]:
        measured: list[str] = []

        def measure(part: str) -> Iterable[Figure]:
            measured.append(part)
            return parts[part]

        monkeypatch.setattr(bench, "PARTS", {part: lambda part=part: measure(part) for part in parts})
        monkeypatch.setattr(bench, "code_commit", commit if callable(commit) else lambda *_: commit)
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


def test_a_part_during_which_the_code_changed_is_of_no_commit(run_bench: Bench, tmp_path: Path) -> None:
    """Nor is any after it: workers are of the new code then, and what measures them is of the old."""
    now = ["abc"]

    def change() -> Iterator[Figure]:
        now[0] = "def"
        yield GOOD

    run_bench(lambda *_: now[0], a=[GOOD], b=change(), c=[GOOD])
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert {part: of["commit"] for part, of in kept.items()} == {"a": "abc", "b": "abc" + DIRTY, "c": "abc" + DIRTY}


def test_what_the_figures_depend_on_is_part_of_their_commit() -> None:
    """All that the bench imports from beside it, but for what only says which commit that is; and what it reads."""
    found = {"experiments/codecs.toml", "experiments/codecs-bytes.toml", "requirements.txt", "tests/gloo/worker.py"}
    for path in (ROOT / "tests" / "bench").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                found.add((node.module or "").replace(".", "/") + ".py")
    argv = ["git", "-C", str(ROOT), "ls-files", "--", *MEASURED]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert found - {"tests/support/provenance.py"} <= set(listed.stdout.split()) | {"tests/bench.py"}


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


def steps_of(mode: str) -> SimpleNamespace:
    """One step that takes a second; the pipeline's takes longer by the clock."""
    columns = dict.fromkeys(("cpu", "blocked", "rest", "total", "hidden", "busy"), 1.0)
    columns["compute"] = 1.14 if mode == PIPELINE else 1.0
    return SimpleNamespace(**{name: np.array([value]) for name, value in columns.items()})


def test_compute_of_every_mode_is_held_against_the_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "network", lambda *_, **__: nullcontext((None, None, None)))
    monkeypatch.setattr(trust, "train", lambda _, __, cases: [Ranks([steps_of(case["mode"])], 0.0) for case in cases])
    by_clock = {figure.name: figure.met for figure in trust.control() if "by the clock" in figure.name}
    assert len(by_clock) == 4
    assert all(met is (PIPELINE not in name) for name, met in by_clock.items())


class Points:
    """Steps as `step` times them, with computing that takes `compute` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates: list[str] = []
        self.compute, self.sent = 1.0, step.LEAST
        monkeypatch.setattr(step, "_time", self.time)
        monkeypatch.setattr(step, "_compute", lambda: 1.0)

    def time(self, rate: str, plan: step.Plan) -> step.Timed:
        self.rates.append(rate)
        patient = [DDP + PATIENT] if plan.patient else []
        search, found = (
            {mode: step.Case([self.compute], self.sent) for mode in modes}
            for modes in (["ddp/bucket:1MiB", PIPELINE], [CONTROL, DDP, "ddp/bucket:1MiB", PIPELINE, *patient])
        )
        return step.Timed(rate, PIPELINE, "ddp/bucket:1MiB", search, found)


@pytest.mark.parametrize(("compute", "times"), [(1.04, 1), (1.2, 2)])
def test_a_rate_that_missed_the_relation_is_fitted_once_more(
    monkeypatch: pytest.MonkeyPatch, compute: float, times: int
) -> None:
    points = Points(monkeypatch)
    points.compute = compute
    figures = list(step.measure_at("2.0"))
    assert len(points.rates) == times
    assert ("C/(F+B)" in figures[0].name) is (times == 2) and figures[0].low is figures[0].high is None
    relation = step.Timed(points.rates[-1], "", "", {}, {CONTROL: step.Case([compute], 0.0)}).relation
    assert relation == pytest.approx(2.0, rel=step.OFF)


def test_a_point_tells_what_it_tried_and_what_patience_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    points = Points(monkeypatch)
    shown = [figure.name for figure in step.measure_at("1.0") if figure.low is figure.high is None]
    assert [name.split(" in the short round")[0] for name in shown[:2]] == [
        "step of ddp/bucket:1MiB",
        f"step of {PIPELINE}",
    ]
    assert shown[2].startswith(f"{DDP + PATIENT} / {PIPELINE}") and len(points.rates) == 1


@pytest.mark.parametrize(("sent", "met"), [(0.0, False), (step.LEAST, True), (1.1 * step.LEAST, False)])
def test_a_counter_that_stands_still_keeps_no_limit(monkeypatch: pytest.MonkeyPatch, sent: float, met: bool) -> None:
    points = Points(monkeypatch)
    points.sent = sent
    (figure,) = (figure for figure in step.measure_at("1gbit") if figure.name.startswith("bytes of"))
    assert figure.met is met


def test_a_case_has_the_deadline_and_the_patience_that_its_worker_gives_it() -> None:
    plain, patient = case(DDP, 3), case(DDP + PATIENT, 3)
    assert (plain.pop("patient"), patient.pop("patient")) == (False, True) and plain == patient
    assert deadline(RunSpec.load(plain, "case"), step.GRADIENT) == DEADLINE
