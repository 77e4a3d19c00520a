"""The benchmarks themselves: what they resume from, which limits they check, and which runs they use.

Nothing is measured here.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from testbed.control.machine.affinity import usable_cores
from testbed.net.tcp import efficiency
from testbed.rank.sync import transport
from testbed.rank.train import deadline
from testbed.results.conclude import Summary
from testbed.results.observations import Calls
from testbed.results.records import Step
from testbed.spec.errors import Unavailable
from testbed.spec.run import RunSpec
from testbed.spec.units import parse_size
from tests.bench import __main__ as bench
from tests.bench import attach, codecs, collectives, identity, instrument, models, openmpi, overhead, step, worker
from tests.bench.codecs import accuracy_differences, allowed_difference, byte_ratio
from tests.bench.figures import MEASURED, Figure
from tests.bench.openmpi import Timing
from tests.bench.shaped_network import BUCKET_VIEW, CONTROL, DDP, DEADLINE_S, PIPELINE, SCHED_BATCH, TrainedCase, case
from tests.support.provenance import DIRTY, ROOT, current
from tests.support.synthetic import make_run

UNLIMITED = Figure(name="unlimited", value=7.0)
GOOD, POOR = Figure(name="good", value=1.0, high=2.0), Figure(name="poor", value=3.0, high=2.0)
Bench = Callable[..., tuple[int, list[str]]]


@pytest.mark.parametrize("by_name", ["first-layers", "models-gpt-1.0", "sizes-gpt-1.0"])
def test_make_bench_measures_models_sizes_and_parts_for_a_change_only_by_name(run_bench: Bench, by_name: str) -> None:
    assert set(bench.ONLY_BY_NAME) < bench.PARTS.keys()
    both = {"a": [GOOD], by_name: [UNLIMITED]}
    assert run_bench("abc", **both) == (0, ["a"])
    assert run_bench("abc", by_name, **both) == (0, [by_name])


def test_it_is_known_how_long_each_part_takes() -> None:
    stored = json.loads((ROOT / "results" / "bench.json").read_text())
    assert all(bench.minutes_of(part, stored.get(part, {})) for part in bench.PARTS)
    assert bench.minutes_of("step-1.0", {"seconds": 90}) == 1.5
    assert bench.minutes_of("step-1.0", {}) == bench.EXPECTED_MINUTES["step"]


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "tests" / "bench").glob("*.py")))
def test_every_module_can_be_imported(module: str) -> None:
    """`make test` runs no benchmark, so a name that has moved is found here."""
    importlib.import_module(f"tests.bench.{module}")


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """`run_bench("abc", "--resume")` at commit abc returns the exit code and the parts that were measured."""

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


def test_resume_skips_only_parts_of_the_same_commit(run_bench: Bench, tmp_path: Path) -> None:
    assert run_bench("abc", a=[GOOD]) == (0, ["a"])
    assert run_bench("abc", "--resume", a=[GOOD], b=[GOOD]) == (0, ["b"])
    assert run_bench("abc", a=[GOOD], b=[GOOD]) == (0, ["a", "b"])
    assert run_bench("def", "--resume", "a", a=[GOOD], b=[GOOD]) == (0, ["a"])
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert {part: of["commit"] for part, of in kept.items()} == {"a": "def", "b": "abc"}


def test_before_each_part_it_says_how_long_it_took_last_time(
    run_bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {
        "a": {"commit": "old", "seconds": 240, "figures": []},
        "c": {"commit": "old", "seconds": 90, "figures": []},
    }
    (tmp_path / "bench.json").write_text(json.dumps(stored))
    run_bench("abc", a=[GOOD], b=[GOOD], c=[GOOD])
    printed = capsys.readouterr().out
    assert "[1/3] a, about 4 minutes; then about 2 minutes and 1 that were never timed\n" in printed
    assert "[3/3] c, about 2 minutes; then about 0 minutes\n" in printed
    assert json.loads((tmp_path / "bench.json").read_text())["a"]["machine"]


def test_a_name_stands_for_all_parts_that_begin_with_it(run_bench: Bench) -> None:
    parts = {"attach-cost": [GOOD], "attach-ddp": [GOOD], "attached": [GOOD]}
    assert run_bench("abc", "attach", **parts) == (0, ["attach-cost", "attach-ddp"])
    assert run_bench("abc", "attach-ddp", **parts) == (0, ["attach-ddp"])
    with pytest.raises(SystemExit):
        run_bench("abc", "att", **parts)


def test_figures_of_a_tree_with_uncommitted_changes_are_never_reused(run_bench: Bench) -> None:
    for _ in range(2):
        assert run_bench("abc" + DIRTY, "--resume", a=[GOOD]) == (0, ["a"])
    assert current("abc", "abc") and not current("abc", "def")
    assert not current("abc" + DIRTY, "abc" + DIRTY) and not current("", "") and not current("abc", "abc" + DIRTY)
    assert current("0123456", "0123456789"), "stored in a clone with fewer objects, where git needs fewer digits"


def test_a_part_during_which_the_code_changed_is_marked_dirty(run_bench: Bench, tmp_path: Path) -> None:
    """So is every later part: its workers load the new code, while this process still runs the old."""
    now = ["abc"]

    def change() -> Iterator[Figure]:
        now[0] = "def"
        yield GOOD

    run_bench(lambda *_: now[0], a=[GOOD], b=change(), c=[GOOD])
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert {part: of["commit"] for part, of in kept.items()} == {"a": "abc", "b": "abc" + DIRTY, "c": "abc" + DIRTY}


def test_measured_lists_every_file_that_the_figures_depend_on() -> None:
    """All modules outside tests/bench that it imports, and the files that it reads; provenance.py changes no figure."""
    found = {"experiments/codecs.toml", "experiments/codecs-bytes.toml", "requirements.txt", "tests/gloo/worker.py"}
    for path in (ROOT / "tests" / "bench").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                found.add((node.module or "").replace(".", "/") + ".py")
    argv = ["git", "-C", str(ROOT), "ls-files", "--", *MEASURED]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert found - {"tests/support/provenance.py"} <= set(listed.stdout.split()) | {"tests/bench.py"}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit("other processes disturbed every step"), "other processes disturbed every step"),
        (Unavailable("no namespaces"), "no namespaces"),
        (subprocess.CalledProcessError(1, ["docker", "ps"], stderr="no engine"), "Traceback"),
        (RuntimeError("no first step"), "Traceback"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_part_that_cannot_be_measured_does_not_keep_the_others_from_it(
    run_bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, says: str
) -> None:
    def disturbed() -> Iterator[Figure]:
        yield GOOD
        raise error

    assert run_bench("abc", a=disturbed(), b=[GOOD]) == (1, ["a", "b"])
    assert json.loads((tmp_path / "bench.json").read_text()).keys() == {"b"}
    printed = capsys.readouterr().out
    assert f"a is not measured: {says}" in printed and "not measured: a." in printed
    assert str(getattr(error, "stderr", error)) in printed
    assert run_bench("abc", "--resume", a=[GOOD], b=[GOOD]) == (0, ["a"])


def test_a_figure_without_a_limit_is_not_counted_as_met(run_bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench("abc", a=[GOOD, UNLIMITED], b=[POOR]) == (1, ["a", "b"])
    printed = capsys.readouterr().out
    assert "1 of 2 limits met" in printed
    assert "ok    good" in printed and "MISS  poor" in printed
    assert "      unlimited: 7.000 (no limit)" in printed and "ok    unlimited" not in printed


def test_a_small_figure_is_not_printed_as_zero() -> None:
    assert ": 2.5e-12 (<= 1e-09)" in str(Figure(name="x", value=2.5e-12, high=1e-9))
    assert ": 0.000 (" in str(Figure(name="x", value=0.0)) and ": -1.250 (" in str(Figure(name="x", value=-1.25))


@pytest.mark.parametrize(("commit", "fresh"), [("abc", False), ("abc" + DIRTY, True)])
def test_codecs_reuse_finished_runs_of_the_same_commit_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commit: str, fresh: bool
) -> None:
    requested: list[tuple[Path, bool]] = []

    def sweep(specs: Any, choice: Any, root: Path, progress: Any, fresh: bool = False) -> tuple[list[Any], list[Any]]:
        requested.append((root, fresh))
        return [], []

    monkeypatch.setenv("TESTBED_RUNS", str(tmp_path))
    monkeypatch.setattr(codecs, "run_all", sweep)
    monkeypatch.setattr(codecs, "code_commit", lambda *_: commit)
    codecs._sweep("codecs", on="process")
    assert requested == [(tmp_path / f"bench-{commit}", fresh)]


def test_a_missing_accuracy_is_refused_and_not_taken_for_0() -> None:
    runs = [
        Summary(spec=RunSpec.load({"mode": mode, "name": mode.replace("/", "-")}, ""), status="ok", test_accuracy=found)
        for mode, found in {"ring": 0.5, "ring/fp16": None}.items()
    ]
    with pytest.raises(SystemExit, match="ring-fp16: no test accuracy"):
        list(accuracy_differences(runs))


def steps_of(mode: str) -> SimpleNamespace:
    """One step whose columns are all 1 s; the pipeline's compute is longer by the clock."""
    columns = dict.fromkeys(("work", "copies", "blocked", "rest", "total", "hidden", "busy"), 1.0)
    columns["compute"] = 1.14 if mode == PIPELINE else 1.0
    return SimpleNamespace(**{name: np.array([value]) for name, value in columns.items()})


def test_the_compute_time_of_every_mode_is_compared_with_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "shaped_network", lambda *_, **__: nullcontext((None, None, None)))
    monkeypatch.setattr(
        instrument, "train", lambda _, __, cases: [TrainedCase([steps_of(case["mode"])], 0.0) for case in cases]
    )
    by_clock = {figure.name: figure.met for figure in instrument.control() if "by the clock" in figure.name}
    assert len(by_clock) == 4
    assert all(met is (PIPELINE not in name) for name, met in by_clock.items())


class FakePoints:
    """In place of `_time_point` and `_control_seconds`: every step takes `compute` seconds and sends `sent` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates: list[str] = []
        self.compute, self.sent = 1.0, step.LEAST_BYTES
        monkeypatch.setattr(step, "_time_point", self.time)
        monkeypatch.setattr(step, "_control_seconds", lambda: 1.0)

    def time(self, rate: str, plan: step.Plan) -> step.PointTimes:
        self.rates.append(rate)
        sched_batch = [DDP + SCHED_BATCH] if plan.sched_batch else []
        search, final = (
            {mode: step.ModeTimes([self.compute], self.sent) for mode in modes}
            for modes in (["ddp/bucket:1MiB", PIPELINE], [CONTROL, DDP, "ddp/bucket:1MiB", PIPELINE, *sched_batch])
        )
        return step.PointTimes(rate, PIPELINE, "ddp/bucket:1MiB", search, final)


@pytest.mark.parametrize(("compute", "times"), [(1.04, 1), (1.2, 2)])
def test_a_rate_that_missed_the_ratio_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, compute: float, times: int
) -> None:
    points = FakePoints(monkeypatch)
    points.compute = compute
    figures = list(step.measure_at("2.0"))
    assert len(points.rates) == times
    assert ("C/(F+B)" in figures[0].name) is (times == 2) and figures[0].low is figures[0].high is None
    ratio = step.PointTimes(points.rates[-1], "", "", {}, {CONTROL: step.ModeTimes([compute], 0.0)}).ratio
    assert ratio == pytest.approx(2.0, rel=step.MAX_RATIO_ERROR)


def test_a_point_shows_the_search_and_ddp_with_sched_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    points = FakePoints(monkeypatch)
    shown = [figure.name for figure in step.measure_at("1.0") if figure.low is figure.high is None]
    assert [name.split(" in the short search")[0] for name in shown[:2]] == [
        "step of ddp/bucket:1MiB",
        f"step of {PIPELINE}",
    ]
    assert shown[2].startswith(f"{DDP + SCHED_BATCH} / {PIPELINE}") and len(points.rates) == 1


@pytest.mark.parametrize(("sent", "met"), [(0.0, False), (step.LEAST_BYTES, True), (1.1 * step.LEAST_BYTES, False)])
def test_a_byte_counter_that_does_not_count_meets_no_limit(
    monkeypatch: pytest.MonkeyPatch, sent: float, met: bool
) -> None:
    points = FakePoints(monkeypatch)
    points.sent = sent
    (figure,) = (figure for figure in step.measure_at("1gbit") if figure.name.startswith("bytes of"))
    assert figure.met is met


def test_a_case_carries_its_deadline_and_scheduling_class() -> None:
    plain, batch, view = (case(DDP + suffix, 3) for suffix in ("", SCHED_BATCH, BUCKET_VIEW))
    options = [each.pop("options") for each in (plain, batch, view)]
    assert options == [{}, {"sched_batch": True}, {"bucket_view": True}]
    assert plain == batch == view
    assert deadline(RunSpec.load(plain, "case"), step.GRADIENT_BYTES) == DEADLINE_S


# --- a user's script ----------------------------------------------------------------------------------------------


def timed(seconds: float, sampled: float, losses: str = "0x1.8p+0", steps: int = 24) -> attach.Timed:
    """Steps of these seconds; those with samples take longer."""
    times = [sampled if attach.with_samples(k) else seconds for k in range(steps)]
    return attach.Timed([losses] * steps, times, [0.5 * each for each in times])


def test_steps_with_samples_are_compared_apart() -> None:
    ratio, processor, sampled, losses, codes = attach.cost_figures(
        "ddp", 10, [timed(0.0119, 0.03)] * 2, [timed(0.01, 0.01)] * 2
    )
    assert ratio.value == pytest.approx(1.19) and ratio.met and ratio.high == 1.20
    assert processor.value == pytest.approx(1.19) and "0.005 s" in processor.detail
    assert sampled.value == pytest.approx(3.0) and sampled.high is None
    assert losses.value == 0 and losses.met
    assert codes.value == 0 and codes.high is None
    (slow, *_) = attach.cost_figures("ddp", 100, [timed(0.103, 0.3)], [timed(0.1, 0.1)])
    assert not slow.met


def test_losses_that_differ_in_one_bit_miss_the_limit() -> None:
    pair = timed(0.01, 0.01), timed(0.01, 0.01, "0x1.8000000000001p+0")
    (*_, losses, _) = attach.cost_figures("gather", 10, [pair[0], pair[0]], [pair[0], pair[1]])
    assert losses.value == 1 and not losses.met


def test_the_median_of_the_pairs_counts_and_codes_are_counted_apart() -> None:
    attached = [timed(seconds, 0.1)._replace(codes=(0, -6)) for seconds in (0.11, 0.12, 0.2)]
    ratio, *_, codes = attach.cost_figures("ddp", 100, attached, [timed(0.1, 0.1)._replace(codes=(0, 0))] * 3)
    assert ratio.value == pytest.approx(1.2) and codes.value == 3 and codes.detail == "of 6; without it 0 of 6"


def test_gradients_and_parameters_are_sampled_in_two_steps_each() -> None:
    assert [k for k in range(20) if attach.with_samples(k)] == [0, 1, 2, 3, 4, 7, 8, 15, 16]


def test_a_step_of_a_script_is_the_mean_over_its_ranks() -> None:
    ranks = [{"ends": [5.0, 6.0, 8.0], "cpu": [1.0, 1.5, 2.0]}, {"ends": [7.0, 10.0, 11.0], "cpu": [0.0, 1.0, 2.0]}]
    lines = [f"warning\n{json.dumps(rank | {'losses': ['0x1p+0', '0x1p+1']})}\nanother one\n" for rank in ranks]
    assert attach.printed(lines) == attach.Timed(["0x1p+0", "0x1p+1"], [2.0, 1.5], [0.75, 0.75])


def test_the_batch_for_a_step_lies_on_the_line_through_two_others() -> None:
    small, large = attach.CALIBRATION
    line = [0.004 + 1e-4 * small, 0.004 + 1e-4 * large]
    assert attach.batch_for(0.020, line) == 160 and attach.batch_for(0.001, line) == 1


def observed_run(period: float, blocked: float, busy: float) -> attach.Run:
    """A run of a DDP script whose steps wait for `blocked` of the `busy` seconds; DDP logs the same times."""
    times = {"compute": period - blocked, "comm": busy, "overlap": busy - blocked}
    row = {"step": 3, "observer": times | {"exposed": blocked}, "ddp": times}
    records: list[Any] = [
        Step(
            **{"step": k, "epoch": 0, "loss": 1.0, "images": 8, "at": k * period, "data": 0.0, "forward": 0.0},
            **{"backward": period, "sync": 0.0, "update": 0.0, "total": period, "blocked": blocked, "busy": busy},
            **{"hidden": busy - blocked, "sent": k * 1_000_000, "received": 0},
            phases=[("backward", 0.0, period)],
            stalls=[(period - blocked, blocked)],
        )
        for k in range(attach.NET_STEPS)
    ]
    records.append(Calls(first=0, last=attach.NET_STEPS - 1, rows=[], detail={"ddp": [row]}))
    return attach.Run([records] * 2, attach.Timed([], [period] * attach.NET_STEPS))


def test_parts_of_a_step_are_held_against_the_scripts_own_clock() -> None:
    run = observed_run(1.0, 0.4, 0.6)
    assert [(figure.value, figure.met) for figure in attach.sums([run])] == [(pytest.approx(1.0), True)] * 2
    slower = run._replace(output=attach.Timed([], [1.1] * attach.NET_STEPS))  # the script sees what the observer misses
    parts, _ = attach.sums([slower])
    assert parts.value == pytest.approx(1 / 1.1) and not parts.met


def test_the_observers_times_are_held_against_those_that_ddp_logs() -> None:
    run = observed_run(1.0, 0.4, 0.6)
    assert all(figure.met and figure.value == pytest.approx(1) for figure in attach.logged([run]))
    run.records[0][-1].detail["ddp"][0]["observer"]["exposed"] = 0.5  # type: ignore[union-attr]
    assert [figure.met for figure in attach.logged([run])] == [True, True, True, False]


def test_exposed_and_busy_are_held_against_what_needs_no_observer() -> None:
    alone = observed_run(0.6, 0.0, 0.0)
    exposed, busy = attach.from_outside([observed_run(1.0, 0.4, 0.6)], alone)
    assert exposed.value == pytest.approx(1.0)
    assert busy.value == pytest.approx(0.6 / (8e6 / (500e6 * 1448 / 1514)))


def test_runs_made_in_turn_are_compared_by_the_period_of_their_steps() -> None:
    figure = attach.ratio_of_periods("x", [observed_run(1.02, 0.4, 0.6)], [observed_run(1.0, 0.4, 0.6)], 0.03)
    assert figure.value == pytest.approx(1.02) and figure.met
    assert not attach.ratio_of_periods("x", [observed_run(0.9, 0.4, 0.6)], [observed_run(1.0, 0.4, 0.6)], 0.03).met


def test_the_largest_difference_of_losses_is_relative() -> None:
    assert attach.largest_difference(["0x1p+1", "0x1.1p+0"], ["0x1p+1", "0x1p+0"]) == pytest.approx(1 / 16)


# --- models ---------------------------------------------------------------------------------------------------------


def times(seconds: float, mode: str = "", busy: float = 2.0, left_out: int = 0) -> models.Times:
    return models.Times([seconds] * 3, left_out, 1e9 / models.NODES, busy, mode)


BEST = "ddp/bucket:2MiB" + BUCKET_VIEW
FINAL = {
    CONTROL: times(1.0),
    DDP: times(2.0),
    BEST: times(1.5, busy=2.5),
    models.OURS: times(1.2, "ring/bucket:1MiB/pipeline", busy=3.0, left_out=1),
}


LOADED = {CONTROL: times(2.5), BEST: times(3.0), models.OURS: times(3.1, busy=2.8)}


def model_figures(loaded: dict[str, models.Times]) -> list[Figure]:
    return list(models.point_figures(models.MODELS_TIMED["vgg11"], 1.0, 32, 1.1, "600mbit", FINAL, loaded))


def test_a_point_compares_the_pipeline_with_the_better_ddp_and_the_wire() -> None:
    found = {figure.name: figure for figure in model_figures(LOADED)}
    assert found["C/(F+B)"].value == pytest.approx(1.1)
    assert found["DDP's best / pipeline"].value == pytest.approx(1.25) and found["DDP's best / pipeline"].met
    assert found["pipeline / max(C, F+B)"].value == pytest.approx(1.2 / 1.1)
    assert found["core-seconds per GB above the control, pipeline"].value == pytest.approx(1.0)
    beside_load = "core-seconds per GB above the control, pipeline beside niced load"
    assert found[beside_load].value == pytest.approx(0.8), "above the control beside the same load"
    beside = found["DDP's best / pipeline, both beside niced load"]
    assert beside.value == pytest.approx(3.0 / 3.1) and not beside.met
    assert found["disturbed steps left out"].value == 1 and found["disturbed steps left out"].detail.startswith(
        "of 22;"
    )


def test_the_table_is_made_from_the_figures() -> None:
    kept = {"models-vgg11-1.0": {"figures": [figure.as_dict() for figure in model_figures({})]}}
    header, rule, row = models.table(kept)
    assert header.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == [
        *("vgg11, 32, 600mbit", "1.10", "1.000", "2.000"),
        *("1.500 (2MiB with bucket views)", "1.200 (1MiB)"),
    ]
    assert cells[7] == "1.25 (limit 1.15)" and cells[-2:] == ["-", "-"]
    kept = {"models-vgg11-1.0": {"figures": [figure.as_dict() for figure in model_figures(LOADED)]}}
    cells = [cell.strip() for cell in models.table(kept)[2].strip("|").split("|")]
    assert cells[-2:] == ["0.97 (limit 1.00, missed)", "0.0; 0.8"]


def test_the_plot_has_a_line_a_model_and_is_equal_for_equal_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = {"models-vgg11-1.0": {"figures": [figure.as_dict() for figure in model_figures({})]}}
    drawn = [tmp_path / "a" / "models.svg", tmp_path / "b" / "models.svg"]
    for path in drawn:
        path.parent.mkdir()
        monkeypatch.setattr(models, "PLOT", path)
        models.plot(kept)
    assert drawn[0].read_bytes() == drawn[1].read_bytes() and b"<svg" in drawn[0].read_bytes()


def test_a_step_is_disturbed_if_others_take_five_percent_of_the_cores() -> None:
    def others(programs: float, used: float, own: float = 0.0) -> float:
        return models.by_others(step.CoreTimes(programs, 0.1, 0.0, 0.0, 0.0, stolen=0.0, own=own), used)

    limit = 0.05 * step.CORES
    assert not models.is_disturbed(1.0, others(1.8 + 0.9 * limit, used=1.9))
    assert models.is_disturbed(1.0, others(1.8 + 1.1 * limit, used=1.9))
    assert not models.is_disturbed(1.0, others(1.8 + 1.1 * limit, used=1.0, own=1.0)), "the bench's own load"


def test_a_point_is_measured_from_its_rate_to_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network and the trainings are faked: which modes run, how often, and at which rate."""
    asked: list[tuple[str, int, bool]] = []

    def time_modes(network: object, folder: object, modes: list[str], *more: Any, **values: Any) -> Any:
        asked.extend((mode, values["batch_per_rank"], bool(more[1:] and more[1])) for mode in modes)
        compute = 0.8 if modes == [CONTROL] else 1.0  # another one at 1 Gbit than at the rate of the point
        return {mode: times(compute if mode == CONTROL else 2.0 - (mode == BEST) * 0.5, mode) for mode in modes}

    receipt = SimpleNamespace(sentence=lambda: "network")
    rates: list[str | None] = []

    def network(rate: str | None, nodes: int = models.NODES) -> Any:
        rates.append(rate)
        return nullcontext((None, receipt, None))

    monkeypatch.setattr(models, "shaped_network", network)
    monkeypatch.setattr(models, "time_modes", time_modes)
    models._control_seconds.cache_clear()
    found = {figure.name: figure.value for figure in models.measure("vgg11", 1.0)}
    assert len(rates) == 3 and rates[0] == "1gbit" and found["C/(F+B)"] == pytest.approx(1.0, rel=0.01)
    assert asked.count((models.OURS, 64, False)) == asked.count((models.OURS, 64, True)) == models.REPEATS
    assert (BEST, 64, True) in asked and (CONTROL, 64, True) in asked and (DDP, 64, True) not in asked
    assert asked.count((DDP, 64, False)) == models.REPEATS, "the search alone is repeated at another rate"
    assert len([name for name in found if "short search" in name]) == len(models.SETTINGS)


SIZE_STEPS_S = (1.31, 1.18, 1.12, 1.25, 1.4)  # of a step, by size


def sizes_measured(monkeypatch: pytest.MonkeyPatch, segment_s: float | None = None) -> dict[str, Any]:
    """results/bench.json with all parts of `sizes`; with `segment_s` steps as the formula in theory.py says."""

    def time_in_turn(model: str, ratio: float, modes: list[str], **_: Any) -> tuple[str, dict[str, models.Times]]:
        found = dict(zip(modes[1:], map(times, SIZE_STEPS_S), strict=True))
        for mode, size in zip(modes[1:], models.SIZES, strict=True):
            b, n = parse_size(size), models.NODES
            if segment_s is not None:
                segments = 2 * (n - 1) * models.gradient_bytes(model) / b
                found[mode] = times(ratio + segment_s * segments + 2 * (n - 1) / n * b / 75e6)
        return "600mbit", found | {models.OURS: times(1.15, "ring/bucket:2MiB/pipeline")}

    monkeypatch.setattr(models, "time_in_turn", time_in_turn)
    return {name: {"figures": [each.as_dict() for each in part()]} for name, part in models.size_parts().items()}


def test_sizes_are_compared_at_all_ratios_for_two_models_and_the_table_has_a_row_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = sizes_measured(monkeypatch)
    assert {"sizes-vgg11-0.5", "sizes-vgg11-2.0", "sizes-gpt-0.5", "sizes-resnet18-1.0"} < kept.keys() and len(
        kept
    ) == 9
    header, rule, *rows = models.sizes_table(kept)
    assert header.count("|") == rule.count("|") == rows[0].count("|") and len(rows) == 9
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[:3] == ["vgg11, 128, 600mbit", "about 0.5", "1.310"]
    assert cells[-2:] == ["1.150 (2MiB)", "1.03 (limit 1.03)"]


def test_the_time_of_a_segment_is_fitted_to_the_steps_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = models.fitted_segment_s(sizes_measured(monkeypatch, segment_s=3e-4))
    assert len(found) == 10 and all(value == pytest.approx(3e-4) for value in found.values())
    assert models.fitted_segment_s({}) == {}


@pytest.mark.parametrize(
    ("part", "nodes", "cases"), [(models.first_layers, [4, 8, 4, 8], 4 * 3), (models.thread_class, [4] * 4, 4 * 3)]
)
def test_a_comparison_of_pipelines_trains_them_in_turn(
    monkeypatch: pytest.MonkeyPatch, part: Callable[[], Iterator[Figure]], nodes: list[int], cases: int
) -> None:
    networks: list[int] = []
    asked: list[tuple[str, bool]] = []

    def network(rate: str, nodes: int) -> Any:
        networks.append(nodes)
        return nullcontext((None, None, None))

    def time_modes(substrate: object, folder: object, modes: list[str], steps: int, own: list[int], **_: Any) -> Any:
        asked.extend((mode, bool(own)) for mode in modes)
        assert modes == modes[: len(modes) // models.PIPELINE_REPEATS] * models.PIPELINE_REPEATS
        return {mode: times(1.0, mode) for mode in modes}

    monkeypatch.setattr(models, "shaped_network", network)
    monkeypatch.setattr(models, "time_modes", time_modes)
    monkeypatch.setattr(models, "_control_seconds", lambda *_: 1.0)
    figures = list(part())
    assert networks == nodes and len(figures) == cases and len({figure.name for figure in figures}) == cases
    loaded = [mode for mode, beside_load in asked if beside_load]
    assert len(loaded) == (len(asked) / 2 if part is models.thread_class else 0)
    assert all(case(mode, 3)["mode"] == models.OURS for mode, _ in asked)
    assert len({str(case(mode, 3)["options"]) for mode, _ in asked}) == 3


def test_a_thread_gets_slices_of_the_length_that_is_asked_for_or_an_error() -> None:
    """Linux 6.12 and later can do it."""
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))

    def work() -> None:
        worker.class_of_thread(0.02)()
        worker.use_slices(0.0)

    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(work).exception(30)
    assert error is None if release >= (6, 12) else "Linux 6.12 or later" in str(error)
    assert worker.class_of_thread(None) is transport.use_sched_batch


def test_niced_load_has_the_lowest_priority_and_ends() -> None:
    """Also of its group: where Linux groups sessions, a nice value counts inside the group alone."""
    with models.niced_load() as pids:
        assert len(pids) == len(usable_cores()) and {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {19}
        groups = [Path(f"/proc/{pid}/autogroup") for pid in pids]
        assert all(group.read_text().strip().endswith("nice 19") for group in groups if group.exists())
        assert len({os.getsid(pid) for pid in pids} - {os.getsid(0)}) == len(pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_every_model_has_a_part_at_every_ratio() -> None:
    assert len(models.parts()) == len(models.MODELS_TIMED) * len(models.RATIOS)
    assert {"models-resnet18-1.0", "models-gpt-0.5"} <= models.parts().keys() <= bench.PARTS.keys()
    for model in models.MODELS_TIMED.values():
        assert model.best.keys() == set(models.RATIOS)


# --- identity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "last"), [(identity.STEPS, "a"), (identity.STEPS, "b"), (identity.STEPS - 1, "a")])
def test_the_hash_of_a_run_is_that_of_all_ranks_after_the_last_step(tmp_path: Path, step: int, last: str) -> None:
    for rank in range(identity.NODES):
        end = {"kind": "hash", "step": step, "parameters": last if rank == identity.NODES - 1 else "a"}
        lines = [{"kind": "hash", "step": 0, "parameters": "begin"}, {"kind": "step"}, end, {"kind": "end"}]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if (step, last) == (identity.STEPS, "a"):
        assert identity.last_hash(tmp_path) == "a"
    else:
        with pytest.raises(SystemExit, match="no common hash after step 5"):
            identity.last_hash(tmp_path)


# --- codecs -------------------------------------------------------------------------------------------------------


def summaries(accuracies: dict[str, list[float]]) -> list[Summary]:
    return [
        Summary(spec=RunSpec.load({"mode": mode, "seed": seed}, ""), status="ok", test_accuracy=percent / 100)
        for mode, found in accuracies.items()
        for seed, percent in enumerate(found)
    ]


def test_accuracies_are_compared_seed_by_seed_and_one_point_is_allowed() -> None:
    near, far, unlimited = accuracy_differences(
        summaries(
            {
                "ring": [30.0, 40.0, 50.0],
                "ring/fp16": [30.8, 40.9, 50.7],
                "direct/int8": [28.7, 38.9, 48.8],
                "direct/topk:0.01": [20.0, 30.0, 40.0],
            }
        )
    )
    assert near.met and near.value == pytest.approx(0.8) and near.high == 1.0
    assert not far.met and far.value == pytest.approx(-1.2)
    assert unlimited.met and unlimited.low is None and "no limit" in str(unlimited)


def test_two_standard_errors_are_allowed_if_seeds_differ_much() -> None:
    assert allowed_difference([-3.0, 0.0, 3.0]) == pytest.approx(2 * 3 / 3**0.5)
    assert allowed_difference([0.1, 0.2, 0.0]) == 1.0


def test_the_byte_ratio_is_relative_to_an_exact_all_reduce() -> None:
    spec = RunSpec.load({"mode": "ring/fp16", "nodes": 4}, "")
    figure = byte_ratio(
        Summary(spec=spec, status="ok", sent_per_step=[0.75e6], gradient_bytes=1_000_000, seconds_per_step=1.0)
    )
    assert figure.value == pytest.approx(0.5) and figure.met


# --- Open MPI on nodes without ssh ---------------------------------------------------------------------------------

TIMING = Timing(seconds=[2.0, 3.0, 4.0], sent=150.2, library="Open MPI v5")


def test_the_agent_enters_the_namespace_of_the_node_that_mpirun_names(tmp_path: Path) -> None:
    ip = tmp_path / "ip"  # prints its arguments
    ip.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    agent = tmp_path / "agent.sh"
    agent.write_text(openmpi.agent_script("testbed-1-2-"))
    for script in (ip, agent):
        script.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [str(agent), "node3", "A=1;export A;prted", "--uri", '"a;b"']
    words = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["netns", "exec", "testbed-1-2-node3"]
    assert words[-2:] == ["node3", 'A=1;export A;prted --uri "a;b"'], "one line for a shell, as ssh passes it"


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    assert openmpi.missing(("no-such-package", "pytest")) == (
        "Open MPI is not measured, no-such-package not installed: pip install -r requirements-bench.txt"
    )
    assert openmpi.missing(("pytest",)) is None


def test_an_open_mpi_figure_is_the_ratio_of_medians_and_has_no_limit() -> None:
    (figure,) = openmpi.figures("200mbit", [1.0, 2.0, 2.5], 150.0, {"its ring": TIMING})
    assert figure.name == "Open MPI's Allreduce, its ring / ring/flat, 200mbit"
    assert (figure.value, figure.low, figure.high) == (1.5, None, None)
    assert "3.000 s (2.000-4.000, n=3), bytes / least 1.001" in figure.detail


def test_bytes_that_bypassed_the_shaped_links_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"0\.501 of the least bytes"):
        list(openmpi.figures("200mbit", [2.0], 300.0, {"its ring": TIMING}))


def test_collectives_across_uplinks_are_compared_with_theory_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """S/B is 0.67 s. On four nodes a ring needs 3 S/B, or 6 where it leaves a rack at every hop; hierarchical needs 3
    in both orders. On six a ring needs 10/3 or 20/3, hierarchical 11/3."""
    asked: list[Any] = []
    once = 64e6 / (100e6 * efficiency())
    monkeypatch.setattr(
        collectives,
        "shaped_network",
        lambda rate, nodes, **keys: asked.append((nodes, keys)) or nullcontext([None] * 3),
    )
    monkeypatch.setattr(
        collectives, "time_collectives", lambda *_: {"ring": [3.2 * once], "hierarchical": [3.45 * once]}
    )
    found = {figure.name: (round(figure.value, 3), figure.met) for figure in collectives.uplinks()}
    assert [nodes for nodes, _ in asked] == [4, 4, 6, 6] and asked[0][1]["uplink"] == "50mbit"
    assert [keys["racks"] for _, keys in asked] == list(collectives.ORDERS)
    expected = {
        "[[0, 1], [2, 3]]": ((1.067, True), (1.15, False)),
        "[[0, 2], [1, 3]]": ((0.533, False), (1.15, False)),
        "[[0, 1], [2, 3], [4, 5]]": ((0.96, True), (0.941, True)),
        "[[0, 3], [1, 4], [2, 5]]": ((0.48, False), (0.941, True)),
    }
    assert found == {
        f"{name}, 8 MB, 100mbit, uplinks of 50mbit, racks {racks}: time / theory": value
        for racks, values in expected.items()
        for name, value in zip(("ring", "hierarchical"), values, strict=True)
    }


def test_the_seconds_of_make_run_are_compared_with_those_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are left out of medians are timed, too; those of another rank are the same seconds again."""
    clock, steps = iter([100.0, 130.0]), 0.0

    def sweep(argv: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        nonlocal steps
        assert argv[3:5] == ["sweep", "experiments/quick.toml"]
        for mode in ("ring", "ddp"):
            folder = Path(env["TESTBED_RUNS"]) / "quick" / mode
            make_run(folder, mode=mode, experiment="quick")
            records = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
            steps += sum(record["total"] for record in records if record["kind"] == "step")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(overhead.subprocess, "run", sweep)
    monkeypatch.setattr(overhead.time, "monotonic", lambda: next(clock))
    (figure,) = overhead.waiting()
    assert figure.value == pytest.approx(30.0 / steps) and figure.high == 1.35
