"""Tuning: what is tried, which candidate wins, when the search ends and what it writes, with known speeds."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.runs.nodes import NodesOfRuns
from testbed.control.runs.progress import Silent
from testbed.control.tuning import search
from testbed.control.tuning.search import Search, candidates, first_mode, neighbours, new_search
from testbed.control.tuning.statistics import REQUIRED_CERTAINTY, Race
from testbed.results.folder import RunFolder
from testbed.results.records import (
    End,
    Error,
    Hash,
    Start,
    Step,
)
from testbed.spec.errors import (
    AllocationLost,
    EngineLost,
    Interrupted,
    NetworkInvalid,
    SpecError,
    TestbedError,
    UsageError,
)
from testbed.spec.experiment import Experiment
from testbed.spec.mode import SyncMode
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import BAD, GOOD, FakeRuns, fails_with, write

GRADIENT = 36_924_456  # VGG-11's


# --- what is tried -----------------------------------------------------------------------------------------------


def test_the_first_round_has_every_schedule_at_sizes_that_fit_the_model() -> None:
    assert candidates(SyncMode.parse("ring"), GRADIENT) == [
        "ddp",
        *(
            f"ring/bucket:{size}/{schedule}"
            for schedule in ("overlap", "pipeline")
            for size in ("1MiB", "4MiB", "16MiB")
        ),
    ]


def test_codecs_and_other_algorithms_are_tried_where_they_are_legal() -> None:
    assert candidates(SyncMode.parse("direct/int8"), GRADIENT) == [
        f"direct/bucket:{size}/overlap/int8" for size in ("1MiB", "4MiB", "16MiB")
    ]
    assert "ddp/bucket:4MiB" in candidates(SyncMode.parse("ddp"), GRADIENT)
    assert candidates(SyncMode.parse("ring"), 10)[1:] == ["ring/bucket:4KiB/overlap", "ring/bucket:4KiB/pipeline"]


def test_neighbours_are_half_and_twice_the_bucket_within_the_limits() -> None:
    around = neighbours(SyncMode.parse("ring/bucket:4MiB/pipeline"), GRADIENT)
    assert around == ["ring/bucket:2MiB/pipeline", "ring/bucket:8MiB/pipeline"]
    assert neighbours(SyncMode.parse("ring/bucket:32MiB/overlap"), GRADIENT) == ["ring/bucket:16MiB/overlap"]
    assert neighbours(SyncMode.parse("direct/bucket:4KiB/overlap/int8"), GRADIENT) == [
        "direct/bucket:8KiB/overlap/int8"
    ]
    assert neighbours(SyncMode.parse("ring"), GRADIENT) == []


@pytest.mark.parametrize("mode", ["ring/bucket:1MiB", "ring/param/overlap", "ring/every:2", "single", "none"])
def test_a_mode_with_a_schedule_or_with_nothing_to_tune_is_refused(mode: str) -> None:
    with pytest.raises(SpecError, match=r"Use ring|algorithm alone"):
        first_mode(SyncMode.parse(mode))


# --- a whole search, on ranks whose speed is known ----------------------------------------------------------------


class Speeds:
    """Ranks whose step takes a time that depends on their mode, with 1 % of noise."""

    def __init__(self, fake: FakeRuns) -> None:
        self.fake = fake
        self.noise = random.Random(3)
        self.order: list[str] = []
        self.broken, self.sound, self.code = "", 0, 1  # a mode, how many of its runs end well, and how the others end
        self.known = {"ring": 2.2, "ddp": 2.0}

    def seconds(self, mode: SyncMode) -> float:
        if str(mode) in self.known:
            return self.known[str(mode)]
        away = abs((mode.bucket or 0).bit_length() - (2 << 20).bit_length())  # from the best size, 2 MiB
        return (1.5 if mode.schedule == "pipeline" else 1.8) * (1 + 0.08 * away)

    def play(self, folder: RunFolder, rank: int) -> int:
        spec = folder.read_spec()
        if rank == 0:
            self.order.append(str(spec.mode))
            self.factor = 1 + self.noise.gauss(0, 0.01)
        if str(spec.mode) == self.broken and self.order.count(self.broken) > self.sound:
            write(folder, rank, Error(code=self.code, message="it broke"))
            return self.code
        size: dict[str, Any] = {"parameters": GRADIENT // 4, "gradient_bytes": GRADIENT, "tensors": 34}
        start = Start(rank=rank, world=spec.world, unix=0.0, deadline=60.0, counter="interface eth0", **size)
        times = dict.fromkeys(("data", "forward", "backward", "sync", "update"), 0.0)
        total = self.seconds(spec.mode) * self.factor
        same: dict[str, Any] = {"epoch": 0, "total": total, "loss": 2.0, "images": 4, **times}
        # Long waits between the steps: the link is slower than some of these speeds.
        steps = [Step(step=k, at=100.0 * k, sent=k, received=k, **same) for k in range(spec.steps or 0)]
        end = End(steps=len(steps), seconds=1.0, sent=100, received=100)
        write(folder, rank, start, *steps, Hash(step=len(steps), parameters="same", agree=True), end)
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRuns:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_RUNS", raising=False)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "main.py").touch()
    fake = FakeRuns()
    fake.receipts = itertools.repeat(GOOD)
    return fake


@pytest.fixture
def speeds(fake: FakeRuns) -> Speeds:
    speeds = Speeds(fake)
    fake.play = speeds.play
    return speeds


def command(fake: FakeRuns, *arguments: str) -> Any:
    flags = ["--on", "fake", "--data", "synthetic", "--nodes", "2", "--rate", "200mbit"]
    return CliRunner().invoke(main.app, ["tune", *flags, *arguments], obj={"fake": fake.type})


def test_nodes_are_reserved_and_made_once_for_all_candidates(speeds: Speeds) -> None:
    held: list[str] = []

    @contextmanager
    def reserve(report: Callable[[str], None]) -> Iterator[None]:
        held.append("begin")
        yield
        assert speeds.fake.made[-1].calls[-1] == ("exit",), "nodes are removed before they are released"
        held.append("end")

    speeds.fake.type = replace(speeds.fake.type, reserve=reserve, keeps_nodes=lambda spec: True)
    found = json.loads(command(speeds.fake, "--json").stdout)
    assert len(found["curve"]) > 3 and held == ["begin", "end"] and len(speeds.fake.made) == 1


@pytest.mark.parametrize("lost", [AllocationLost, EngineLost])
def test_without_nodes_the_search_ends_and_keeps_what_it_found(
    speeds: Speeds, lost: type[AllocationLost | EngineLost], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = search.execute

    def loses_the_fourth(*arguments: Any, **options: Any) -> Any:
        if len(speeds.order) == 3:
            raise lost("the nodes are gone")
        return execute(*arguments, **options)

    monkeypatch.setattr(search, "execute", loses_the_fourth)
    found = command(speeds.fake)
    assert isinstance(found.exception, lost) and "the nodes are gone" in str(found.exception)
    assert len(speeds.order) == 3 and "not tried: ring/bucket" in found.stdout and "dropped:" not in found.stdout


def test_it_finds_the_fastest_with_its_certainty_and_writes_an_experiment(speeds: Speeds) -> None:
    found = json.loads(command(speeds.fake, "--json").stdout)
    assert found["winner"] == "ring/bucket:2MiB/pipeline"  # a size that the first round did not try
    assert found["sure"] >= REQUIRED_CERTAINTY and found["ended"] == "certain enough"
    best = next(point for point in found["curve"] if point["mode"] == found["winner"])
    assert best["low"] <= 1.5 <= best["high"]
    experiment = Experiment.read(Path(found["file"]))
    assert [str(spec.mode) for spec in experiment.runs()] == ["ring", "ddp", "ring/bucket:2MiB/pipeline"]
    run = experiment.runs()[0]
    assert (run.link.rate, run.nodes, run.data.name, run.steps) == (200_000_000, 2, "synthetic", 40)


def test_it_prints_a_curve_the_winner_and_the_factor_to_the_reference(speeds: Speeds) -> None:
    result = command(speeds.fake)
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ring/bucket")]
    sizes = [row.split("|")[1].strip() for row in rows if "pipeline" in row]
    assert sizes == sorted(sizes, key=lambda text: SyncMode.parse(text).bucket or 0)
    assert "winner: ring/bucket:2MiB/pipeline" in result.stdout
    assert "ddp takes 1.3" in result.stdout
    assert "testbed sweep experiments/tuned.toml" in result.stdout


def test_a_script_is_tuned_by_modes_instead_of_its_own_which_is_the_reference(speeds: Speeds) -> None:
    speeds.known["script"] = 3.0
    result = command(speeds.fake, "--set", "script.as_cpu=true", "--", "python", "main.py", "--rank", "{rank}")
    assert result.exit_code == 0, result.output
    assert speeds.order[:2] == ["ring", "script"]
    text = " ".join(result.output.split())
    assert "winner: ring/bucket:2MiB/pipeline" in text and "main.py itself takes" in text
    use = "--instead ring/bucket:2MiB/pipeline --nodes 2 --rate 200mbit --on fake --set script.as_cpu=true"
    assert f"use it: testbed exec {use} -- python main.py --rank {{rank}}" in text
    assert not Path("experiments/tuned.toml").exists()


def test_a_mode_that_cannot_replace_a_scripts_synchronisation_is_dropped(speeds: Speeds) -> None:
    speeds.known["script"], speeds.broken, speeds.code = 3.0, "ring/bucket:4MiB/pipeline", 2
    found = json.loads(command(speeds.fake, "--json", "--", "python", "main.py").stdout)
    assert "it broke" in found["dropped"]["ring/bucket:4MiB/pipeline"]


def test_a_script_whose_gradients_no_mode_can_replace_ends_the_search(speeds: Speeds) -> None:
    speeds.broken, speeds.code = "ring", 2
    result = command(speeds.fake, "--json", "--", "python", "main.py")
    assert isinstance(result.exception, UsageError) and speeds.order == ["ring"]


def test_a_users_method_whose_name_begins_with_ddp_is_not_the_reference(
    speeds: Speeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path / "methods"))
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "ddp_x.py").write_text("def mean_(buffer, group): ...\n")
    speeds.known |= {"ddp-x": 2.7}
    said = command(speeds.fake, "--mode", "ddp-x").stdout
    assert "winner: ddp-x/bucket:2MiB/overlap" in said
    assert "\nddp takes 1.1" in said and "\nddp-x takes" not in said


def test_later_rounds_run_only_candidates_that_may_still_win(speeds: Speeds) -> None:
    command(speeds.fake, "--json")
    assert speeds.order[0] == "ring"
    assert speeds.order.count("ring") == speeds.order.count("ddp") == 1, "it was far behind"
    assert speeds.order.count("ring/bucket:2MiB/pipeline") >= 3


def test_repeats_are_interleaved(speeds: Speeds) -> None:
    speeds.known |= {
        "ring/bucket:2MiB/pipeline": 1.5,
        "ring/bucket:4MiB/pipeline": 1.5,
        "ring/bucket:1MiB/pipeline": 1.52,
    }
    command(speeds.fake, "--json")
    assert all(a != b for a, b in itertools.pairwise(speeds.order))


def test_when_the_time_is_over_it_ends_with_what_was_found(speeds: Speeds) -> None:
    found = json.loads(command(speeds.fake, "--json", "--minutes", "0").stdout)
    assert found["winner"] == "ring" and "time is up" in found["ended"]
    assert found["untried"] == candidates(SyncMode.parse("ring"), GRADIENT)
    assert Path(found["file"]).is_file()


def test_a_candidate_that_fails_is_dropped_by_name_and_the_search_goes_on(speeds: Speeds) -> None:
    speeds.broken = "ring/bucket:4MiB/pipeline"
    found = json.loads(command(speeds.fake, "--json").stdout)
    assert list(found["dropped"]) == [speeds.broken] and "it broke" in found["dropped"][speeds.broken]
    assert speeds.order.count(speeds.broken) == 1
    assert found["winner"] == "ring/bucket:2MiB/pipeline"


@pytest.mark.parametrize("broken", ["ring/bucket:2MiB/pipeline", "ring"])
def test_a_candidate_that_fails_later_does_not_win_by_its_earlier_times(speeds: Speeds, broken: str) -> None:
    speeds.known[broken] = 1.0
    speeds.broken, speeds.sound = broken, 1
    found = json.loads(command(speeds.fake, "--json").stdout)
    assert speeds.order.count(broken) == 2, "it was never the leader"
    assert list(found["dropped"]) == [broken] and broken not in {point["mode"] for point in found["curve"]}
    modes = [str(spec.mode) for spec in Experiment.read(Path(found["file"])).runs()]
    assert found["winner"] in modes and broken not in [*modes, found["winner"]]


def test_when_the_last_timed_candidate_fails_the_search_ends(tmp_path: Path, fake: FakeRuns) -> None:
    fake.play = fails_with(3, "it broke")
    spec = RunSpec.load({"data": {"name": "synthetic"}, "nodes": 2, "probe": False}, "test")
    found = Search(spec, tmp_path / "tune", race=Race({"ring": [1.0]}))
    with pytest.raises(TestbedError, match=r"no candidate could be timed: ring failed: rank 0 .*it broke"):
        search._run_round(["ring"], 2, found, fake.choice, Silent(), math.inf, NodesOfRuns())


def test_when_the_first_run_fails_nothing_can_be_tuned(speeds: Speeds) -> None:
    speeds.broken = "ring"
    result = command(speeds.fake, "--json")
    assert isinstance(result.exception, TestbedError) and "it broke" in str(result.exception)


def test_a_network_that_is_off_does_not_count_and_three_times_ends_it(fake: FakeRuns, speeds: Speeds) -> None:
    fake.receipts = itertools.chain([BAD, BAD], itertools.repeat(GOOD))  # one run: each is probed twice
    assert json.loads(command(speeds.fake, "--json").stdout)["winner"] == "ring/bucket:2MiB/pipeline"
    fake.receipts = itertools.repeat(BAD)
    assert isinstance(command(speeds.fake, "--json").exception, NetworkInvalid)


@pytest.mark.parametrize(("before", "timed"), [(1, False), (10, True)])
def test_with_others_timed_a_candidate_whose_network_is_off_is_dropped(
    fake: FakeRuns, speeds: Speeds, before: int, timed: bool
) -> None:
    """In its first round, or when it has been timed before: then that still counts."""
    runs = 2 * search.MAX_TRIES  # each is probed twice
    fake.receipts = itertools.chain([GOOD] * before, [BAD] * runs, itertools.repeat(GOOD))
    found = json.loads(command(speeds.fake, "--json").stdout)
    ((name, why),) = found["dropped"].items()
    assert "3 times" in why and (name in {point["mode"] for point in found["curve"]}) is timed
    assert found["winner"] == "ring/bucket:2MiB/pipeline" and Path(found["file"]).is_file()


def test_interrupted_it_prints_what_it_has_and_writes_no_file(speeds: Speeds) -> None:
    speeds.fake.receipts = iter([GOOD, GOOD, GOOD, KeyboardInterrupt])  # Ctrl-C during the fourth run
    result = command(speeds.fake)
    assert isinstance(result.exception, Interrupted)
    assert "best so far: " in result.stdout and "ended: interrupted" in result.stdout
    assert "every candidate ran only once" in result.stdout
    assert "not tried: ring/bucket:4MiB/overlap, ring/bucket:16MiB/overlap" in result.stdout
    assert not Path("experiments/tuned.toml").exists()


def test_a_file_that_cannot_or_must_not_be_written_is_refused_before_the_search(speeds: Speeds, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("title = 'mine'\n")
    for path in (mine, tmp_path / "nowhere" / "x.toml"):
        with pytest.raises(UsageError, match=path.name):
            new_search(RunSpec(), path)
        assert isinstance(command(speeds.fake, "--out", str(path)).exception, UsageError)
    assert speeds.order == []
    command(speeds.fake, "--out", str(tmp_path / "new.toml"))
    new_search(RunSpec(), tmp_path / "new.toml")  # its own file may be overwritten


def test_every_setting_reaches_the_file(speeds: Speeds, tmp_path: Path) -> None:
    rate, lr, shares = "overrides.node1.link.rate=50mbit", "optimizer.lr=0.00001", "data.shares=[3, 5]"
    command(speeds.fake, "--set", rate, "--set", lr, "--set", shares, "--batch", "8", "--set", "probe=false")
    run = Experiment.read(tmp_path / "experiments" / "tuned.toml").runs()[0]
    assert run.overrides["node1"].link and run.overrides["node1"].link.rate == 50_000_000
    assert (run.optimizer.lr, run.data.shares) == (0.00001, (3, 5))


def test_a_new_search_has_no_times(tmp_path: Path) -> None:
    assert Search(RunSpec(), tmp_path).race.times == {}
