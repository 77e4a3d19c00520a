"""The observer inside scripts of every style: what it records, and that the script does not change."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from testbed.attach import observer, seams
from testbed.attach.as_cpu import CHANGED, GLOO
from testbed.attach.events import FAULT, Part
from testbed.attach.seams import SEAMS
from testbed.results.observations import Calls, Gradients, Setup
from testbed.results.records import Start, Step
from tests.scripts.common import GRADIENT_BYTES
from tests.support.observed import Rank, run_ranks

pytestmark = pytest.mark.gloo
STEPS = 4  # of each script


def observed(folder: Path, script: str, started: bool = False, **variables: str) -> list[Rank]:
    """Run a script with and without the observer; what it prints and its exit codes are equal, bit for bit."""
    alone = run_ranks(folder, script, attached=False, variables=variables, started=started)
    ranks = run_ranks(folder, script, variables=variables, started=started)
    assert [rank.code for rank in alone] == [0, 0], alone[0].output
    assert [(rank.code, printed(rank)) for rank in ranks] == [(rank.code, printed(rank)) for rank in alone]
    for rank in ranks:
        assert rank.unseen == []
        for step in rank.of(Step):
            assert step.blocked + step.hidden == pytest.approx(step.busy, rel=0.05, abs=2e-4)
    return ranks


def printed(rank: Rank) -> list[str]:
    """The script's own lines; torch's warnings have times and process ids in them."""
    lines = [line for line in rank.output.splitlines() if line.startswith("rank ")]
    assert lines, rank.output
    return lines


def steps_of(rank: Rank, count: int = STEPS) -> list[Step]:
    steps: list[Step] = rank.of(Step)
    assert [step.step for step in steps] == list(range(count))
    return steps


def losses_of(rank: Rank) -> list[float]:
    """The losses that a script printed."""
    return [float.fromhex(word) for word in rank.output.strip().splitlines()[-1].split(": ")[1].split()]


def test_gather_and_scatter_by_hand(tmp_path: Path) -> None:
    for number, rank in enumerate(observed(tmp_path, "mean_on_root.py", started=True)):
        assert rank.of(Start)[0].rank == number and rank.of(Start)[0].gradient_bytes == GRADIENT_BYTES
        assert [step.loss for step in steps_of(rank)] == losses_of(rank)
        rows = {row.operation: row for row in rank.rows}
        assert list(rows) == ["gather", "scatter"]
        assert rows["gather"].site == "mean_on_root.py:20" and rows["scatter"].site == "mean_on_root.py:22"
        for row in rows.values():
            assert (row.phase, row.count, row.bytes, row.by) == ("sync", 4 * STEPS, STEPS * GRADIENT_BYTES, "")
            assert row.detail == {"group": 2, "root": 0, "smallest": 16, "largest": 2048}
            assert 0 < row.blocked <= row.seconds


def test_all_reduce_by_hand(tmp_path: Path) -> None:
    for rank in observed(tmp_path, "all_reduce.py"):
        steps_of(rank)
        each, flat, metric = (next(row for row in rank.rows if row.site == f"all_reduce.py:{k}") for k in (23, 28, 34))
        assert (each.count, each.bytes) == (4 * 2, 2 * GRADIENT_BYTES) and each.detail["reduce"] == "sum"
        assert (flat.count, flat.bytes) == (2, 2 * GRADIENT_BYTES) and flat.blocked > 0
        assert (metric.count, metric.bytes, metric.detail["reduce"]) == (STEPS, 4 * STEPS, "max")


def test_a_collective_is_recorded_alike_by_its_arguments_and_by_the_dispatcher(tmp_path: Path) -> None:
    """A call that names its group is seen by the dispatcher only: both calls of a line are in one row."""
    per_step = 2
    for rank in observed(tmp_path, "both_ways.py"):
        rows = [row for row in rank.rows if row.site != "both_ways.py:33"]
        assert [(row.operation, row.detail.get("reduce"), row.detail.get("root")) for row in rows] == [
            ("all_reduce", "sum", None),
            ("all_reduce", "max", None),
            ("broadcast", None, 1),
            ("reduce", "sum", 1),
            ("gather", None, 0),
            ("scatter", None, 1),
            ("all_gather", None, None),
            ("all_reduce", "sum", None),
        ]
        for row in rows:
            size = 64 if row.operation == "all_gather" else 32
            assert (row.count, row.bytes, row.by) == (per_step * STEPS, per_step * STEPS * size, ""), row
            assert row.detail["group"] == 2 and "ranks" not in row.detail and 0 < row.blocked <= row.seconds


def test_a_ring_by_hand(tmp_path: Path) -> None:
    for number, rank in enumerate(observed(tmp_path, "own_ring.py")):
        steps_of(rank)
        rows = {(row.operation, row.site): row for row in rank.rows}
        assert set(rows) == {(kind, f"own_ring.py:{line}") for kind in ("send", "recv") for line in (18, 20)}
        for row in rows.values():
            assert (row.count, row.bytes, row.phase) == (2, 2 * GRADIENT_BYTES, "sync")
            assert row.detail["peer"] == 1 - number and row.seconds > 0


def test_two_optimizers_that_take_turns_make_one_step(tmp_path: Path) -> None:
    for rank in observed(tmp_path, "two_optimizers.py"):
        assert len(rank.of(Step)) == STEPS
        (row,) = rank.rows
        assert (row.count, row.bytes) == (4 * STEPS, STEPS * 4 * (4 * 16 + 16 + 16 + 1))


@pytest.mark.parametrize("style", ["accumulate", "scaler", "closure"])
def test_styles_of_ddp(tmp_path: Path, style: str) -> None:
    for rank in observed(tmp_path, "ddp_styles.py", STYLE=style):
        steps, printed = steps_of(rank), losses_of(rank)
        if style == "accumulate":  # two losses a step; the last one is printed
            assert all(step.loss > 0 for step in steps)
        else:
            assert [step.loss for step in steps] == printed
        (row,) = (row for row in rank.rows if row.phase == "backward")
        assert (row.operation, row.by) == ("all_reduce", "DistributedDataParallel")
        assert (row.bytes, row.detail["reduce"]) == (STEPS * GRADIENT_BYTES, "sum") and row.blocked > 0
        assert all(step.backward > 0 and step.forward > 0 and step.update > 0 for step in steps)


def test_backward_passes_inside_the_backward_pass_are_one_pass(tmp_path: Path) -> None:
    for rank in observed(tmp_path, "ddp_checkpoint.py"):
        for step, loss in zip(steps_of(rank), losses_of(rank), strict=True):
            assert step.loss == loss and [name for name, *_ in step.phases].count("backward") == 1
            assert step.blocked > 0
        assert {record.passes for record in rank.of(Gradients)} == {1}
        assert {row.by for row in rank.rows if row.phase == "backward"} == {"DistributedDataParallel"}
        assert sum(row.bytes for row in rank.rows if row.phase == "backward") == STEPS * GRADIENT_BYTES


@pytest.mark.parametrize(("style", "site", "share"), [("hook", "ddp_styles.py:19", 1), ("fp16", "ddp_styles.py:52", 2)])
def test_a_communication_hook_of_ddp(tmp_path: Path, style: str, site: str, share: int) -> None:
    for rank in observed(tmp_path, "ddp_styles.py", STYLE=style):
        steps_of(rank)
        (row,) = (row for row in rank.rows if row.phase == "backward")
        assert row.bytes == STEPS * GRADIENT_BYTES // share and row.blocked > 0
        assert row.site == site
        assert "communication hook" in rank.of(Setup)[0].wrappers
        assert None not in rank.of(Setup)[0].wrappers["DistributedDataParallel"].values()


def test_fully_shard(tmp_path: Path) -> None:
    for rank in observed(tmp_path, "fsdp2.py"):
        steps_of(rank)
        assert rank.of(Start)[0].gradient_bytes == GRADIENT_BYTES
        rows = {(row.operation, row.by) for row in rank.rows if row.phase in ("forward", "backward")}
        assert {("all_gather", "FSDP"), ("reduce_scatter", "FSDP")} <= rows
        reduced = [row for row in rank.rows if row.operation == "reduce_scatter"]
        assert sum(row.bytes for row in reduced) == STEPS * GRADIENT_BYTES and sum(row.blocked for row in reduced) > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_that_starts_its_own_rank_and_workers(tmp_path: Path, method: str) -> None:
    for number, rank in enumerate(observed(tmp_path, "own_ranks.py", started=True, START_METHOD=method)):
        steps = steps_of(rank)
        assert [step.epoch for step in steps] == [0, 0, 1, 1] and [step.images for step in steps] == [4] * STEPS
        assert [start.rank for start in rank.of(Start)] == [number]
        # time between two steps, in which the script evaluates, belongs to neither
        assert steps[2].at > steps[1].at + steps[1].total
        (metric,) = (row for row in rank.rows if row.operation == "all_reduce" and row.phase != "backward")
        assert metric.phase in ("evaluation", "other") and metric.count == STEPS // 2


def test_a_compiled_model(tmp_path: Path) -> None:
    for rank in observed(tmp_path, "compiled.py", started=True):
        steps_of(rank)
        reduced = [row for row in rank.rows if row.phase == "backward"]
        assert sum(row.bytes for row in reduced) == STEPS * GRADIENT_BYTES
        assert any(row.operation == "all_reduce" and row.phase != "backward" for row in rank.rows)


@pytest.mark.quiet
def test_the_times_of_a_ddp_script_are_those_that_ddp_logs(tmp_path: Path) -> None:
    """DDP's own logging data is of the same backward pass, so it differs by microseconds; a busy machine adds some.

    Times that are wrong differ in every attempt, those of a machine that others use in some.
    """
    for _ in range(3):
        differences = [each for rank in run_ranks(tmp_path, "ddp_wide.py") for each in _differences_from_ddp(rank)]
        if not differences:
            return
    pytest.fail(f"name, by the observer, by DDP: {differences}")


def _differences_from_ddp(rank: Rank) -> list[tuple[str, float, float]]:
    assert rank.code == 0, rank.output
    (entry, *_) = pairs = rank.of(Calls)[-1].detail["ddp"]
    assert {"compute", "comm", "overlap"} == set(entry["ddp"]) and len(pairs) == 7
    found = []
    for name in entry["ddp"]:
        ours, theirs = (statistics.median(pair[whose][name] for pair in pairs) for whose in ("observer", "ddp"))
        if ours != pytest.approx(theirs, rel=0.05, abs=2e-3):
            found.append((name, ours, theirs))
    return found


def test_the_line_of_an_evaluation_is_recorded_with_the_next_step(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, "evaluates.py")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    found = [[step.evaluated for step in steps_of(rank)] for rank in ranks]
    assert found == [["", "", "evaluates.py:18", ""], [""] * 4]  # what comes before the first step belongs to none


def test_a_script_for_cuda_runs_on_the_cpu(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, "for_cuda.py", request={"as_cpu": True})
    for rank in ranks:
        assert rank.code == 0, rank.output
        (setup,) = rank.of(Setup)
        assert setup.backend == "gloo" and setup.changed == [CHANGED, GLOO]
        steps_of(rank)
    assert losses_of(ranks[0]) == losses_of(ranks[1])  # the mean over all ranks
    assert [rank.code for rank in run_ranks(tmp_path, "for_cuda.py")] == [1, 1]


# --- it fails open ---------------------------------------------------------------------------------------------------

EVENTS = [name for name, value in vars(Part).items() if callable(value)]
CALLED = [
    "group",
    "collectives",
    "ends",
    "waits",
    "backward",
    "scalers",
    "optimizers",
    "optimizers made",
    "samplers",
    "clipping",
    "fork",
    "data",
    "evaluation",
    "wrappers",
]
FAULTS = [*CALLED, *(f"install {seam}" for seam in (*SEAMS, "rewrite", "vision", "where"))]
FAULTS += [f"{part}.{event}" for part in ("Steps", "Sampling") for event in EVENTS]


def test_every_seam_is_made_to_fail() -> None:
    source = "".join(Path(module.__file__ or "").read_text() for module in (seams, observer))
    assert set(re.findall(r'hub\.observe\(\s*"([a-z ]+)"', source)) == set(CALLED)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Rank:
    """The script without the observer."""
    (rank,) = run_ranks(tmp_path_factory.mktemp("alone"), "everything.py", ranks=1, attached=False)
    assert rank.code == 7, rank.output
    return rank


@pytest.mark.parametrize("fault", FAULTS)
def test_an_observer_that_fails_changes_nothing(tmp_path: Path, alone: Rank, fault: str) -> None:
    (rank,) = run_ranks(tmp_path, "everything.py", ranks=1, variables={FAULT: fault})
    assert (rank.code, rank.output) == (alone.code, alone.output)
    assert rank.unseen == [fault]


@pytest.fixture(scope="module")
def two_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """Two ranks of the script without the observer."""
    ranks = run_ranks(tmp_path_factory.mktemp("two"), "everything.py", attached=False)
    assert [rank.code for rank in ranks] == [7, 7], ranks[0].output
    return ranks


@pytest.mark.parametrize(
    "fault",
    [
        *("group", "collectives", "waits", "ends", "backward", "optimizers", "wrappers", "fork"),
        *("Steps.update_ended", "Sampling.backward_began", "install collectives"),
    ],
)
def test_an_observer_that_fails_on_one_rank_changes_nothing_on_any(
    tmp_path: Path, two_alone: list[Rank], fault: str
) -> None:
    """No rank may wait for what the observer of another one no longer does."""
    ranks = run_ranks(tmp_path, "everything.py", of_rank={1: {FAULT: fault}})
    assert [(rank.code, printed(rank)) for rank in ranks] == [(rank.code, printed(rank)) for rank in two_alone]
    assert [rank.unseen for rank in ranks] == [[], [fault]]
    assert len(ranks[0].of(Step)) == 2


def test_a_launcher_that_is_gone_changes_nothing(tmp_path: Path, alone: Rank) -> None:
    (rank,) = run_ranks(tmp_path, "everything.py", ranks=1, listening=False)
    assert (rank.code, rank.output, rank.records) == (alone.code, alone.output, [])


def test_a_full_disk_at_the_launcher_changes_nothing(tmp_path: Path, alone: Rank) -> None:
    (rank,) = run_ranks(tmp_path, "everything.py", ranks=1, records="/dev/full")
    assert (rank.code, rank.output) == (alone.code, alone.output)
