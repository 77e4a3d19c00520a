"""`make measure`: what is missing, how long it takes, when the machine is quiet, and what an archive keeps of a run."""

from __future__ import annotations

import itertools
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import Chapter, chapters
from testbed.report.tables import modes, ranks
from testbed.results.conclude import Summary
from testbed.results.folder import EXPERIMENT, RunFolder
from testbed.results.validity import MachineLoad
from testbed.spec.errors import Unavailable
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec
from tests.bench import measure
from tests.support.provenance import DIRTY, ROOT
from tests.support.synthetic import make_run

R3 = ROOT / "experiments" / "r3.toml"
FACTS = {"commit": "abc", "load": 0.1, "minutes": 2.5, "substrate": "netns"}


def test_an_archive_gives_the_same_tables_as_the_run_folders(tmp_path: Path) -> None:
    """So do the shares of a profiler. What a report does not read is left out."""
    folder = tmp_path / "runs" / "few"
    for mode in ("single", "ring", "ddp"):
        make_run(folder / mode, mode=mode, experiment="few", link={"rate": "500mbit"})
        RunFolder(folder / mode).profile(0).write_text(json.dumps({"compute": 0.5}))
        RunFolder(folder / mode).log(0).write_text("a line")
        RunFolder(folder / mode).trace(0).write_text("{}")
    (folder / EXPERIMENT).write_text(json.dumps({"name": "few", "title": "t"}))
    archive = tmp_path / "results" / "few.tar.xz"
    measure.pack(folder, [folder / mode for mode in ("ddp", "ring", "single")], archive, FACTS)
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".log", ".trace.json"))]
        tar.extractall(tmp_path / "again", filter="data")
    assert measure.facts(archive) == FACTS
    once, again = chapter_in(folder), chapter_in(tmp_path / "again")
    for table in (modes, ranks):
        assert table(again) == table(once)
    first = archive.read_bytes()
    measure.pack(folder, [folder / mode for mode in ("ring", "single", "ddp")], archive, FACTS)
    assert archive.read_bytes() == first


def chapter_in(folder: Path) -> Chapter:
    (chapter,) = chapters(load([folder]))
    return chapter


def test_an_archive_of_runs_without_times_has_no_intervals_and_one_hash() -> None:
    lines = [
        {"kind": kind, "number": k, "x": 0.123456789} for k, kind in enumerate(["start", "hash", "step", "hash", "end"])
    ]
    lines[2] |= {"loss": 2.123456789, "phases": [["forward", 0.1, 0.2]]}
    text = "".join(json.dumps(line) + "\n" for line in lines)

    def kept(**values: Any) -> list[dict[str, Any]]:
        spec = RunSpec.load({"mode": "ring", "steps": 4} | values, "")
        return [json.loads(line) for line in measure._records(text, spec)]

    untimed = kept(epochs=2, steps=None, probe=False)
    assert [record["number"] for record in untimed] == [0, 2, 3, 4]
    assert untimed[1] == {"kind": "step", "number": 2, "x": 0.123, "loss": 2.123457, "phases": []}
    timed = kept(probe=False)
    assert timed == kept(epochs=2, steps=None) and [record["number"] for record in timed] == [0, 1, 2, 3, 4]
    assert timed[2] == {"kind": "step", "number": 2, "x": 0.123457, "loss": 2.123457, "phases": [["forward", 0.1, 0.2]]}


def test_archives_that_are_kept_are_whole_and_small() -> None:
    for archive in measure.SWEEPS.glob("*.tar.xz"):
        found = measure.facts(archive)
        assert {"commit", "load", "minutes", "substrate"} <= found.keys() and not found["commit"].endswith(DIRTY)
    size = sum(file.stat().st_size for file in (ROOT / "results").rglob("*") if file.is_file())
    assert size <= measure.MAX_RESULTS_BYTES


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`measured(items, "--list")`: the names that were measured, the exit code, and what was printed."""

    def run(
        missing: dict[str, tuple[float | None, bool]], *argv: str, fails: str = "", commit: str = "abc"
    ) -> SimpleNamespace:
        done: list[str] = []

        def item(name: str, minutes: float | None, is_missing: bool) -> measure.Item:
            return measure.Item(name, minutes, is_missing, lambda: done.append(name) is None and name != fails)

        monkeypatch.setattr(measure, "items", lambda *_: [item(name, *each) for name, each in missing.items()])
        monkeypatch.setattr(measure, "wait_until_quiet", lambda: None)
        monkeypatch.setattr(measure, "code_commit", lambda *_: commit)
        monkeypatch.setattr(sys, "argv", ["measure", *argv])
        code = measure.main()
        return SimpleNamespace(done=done, code=code, printed=capsys.readouterr().out)

    return run


SOME = {"r0": (13.0, True), "r1": (9.0, False), "growth": (None, True), "loop": (2.4, True)}


def test_what_is_missing_is_measured_and_the_time_is_said_before(measured: Any) -> None:
    listed = measured(SOME, "--list")
    assert listed.done == [] and listed.code == 0
    assert "missing at this commit: 3, about 15 minutes and 1 that were never timed" in listed.printed
    everything = measured(SOME)
    assert everything.done == ["r0", "growth", "loop"] and everything.code == 0
    assert "[1/3] r0, about 13 minutes; then about 2 minutes and 1 that were never timed" in everything.printed


def test_one_that_fails_does_not_end_the_others_and_is_named(measured: Any) -> None:
    failed = measured(SOME, fails="r0")
    assert failed.done == ["r0", "growth", "loop"] and failed.code == 1
    assert "still missing: r0." in failed.printed
    assert measured(SOME, "loop", "r1").done == ["loop"]
    with pytest.raises(SystemExit):
        measured(SOME, "lop")


def test_uncommitted_changes_are_refused_before_anything_is_measured(measured: Any) -> None:
    """Results of hours would belong to no commit."""
    assert measured(SOME, "--list", commit="abc" + DIRTY).code == 0
    with pytest.raises(SystemExit, match="uncommitted changes"):
        measured(SOME, commit="abc" + DIRTY)


def test_an_experiment_that_this_machine_cannot_run_is_missing_and_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Unavailable("this machine's kernel lacks delay and loss (netem)")

    monkeypatch.setenv("TESTBED_RUNS", "")  # `sweep` sets it
    monkeypatch.setattr(measure, "SUBSTRATES", {name: SimpleNamespace(check=refuse) for name in ("netns", "uml")})
    assert measure.sweep(ROOT / "experiments" / "wan.toml", tmp_path / "wan.tar.xz") is False
    assert "wan: cannot be measured here: this machine's kernel lacks delay and loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("experiment", "lacking", "on"),
    [("wan", [], "netns"), ("wan", ["netns"], "uml"), ("quick", ["netns"], "netns"), ("epoch", ["netns"], "process")],
)
def test_an_experiment_runs_in_a_user_mode_kernel_only_for_delay_and_loss_that_this_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch, experiment: str, lacking: list[str], on: str
) -> None:
    def check(name: str) -> Any:
        def refuse(plans: Any) -> None:
            if name in lacking:
                raise Unavailable(f"{name} cannot")

        return SimpleNamespace(check=refuse)

    monkeypatch.setattr(measure, "SUBSTRATES", {name: check(name) for name in ("netns", "uml")})
    specs = Experiment.read(ROOT / "experiments" / f"{experiment}.toml").runs()
    assert measure.substrate_for(specs) == on
    if experiment == "wan":
        lacking[:] = ["netns", "uml"]
        with pytest.raises(Unavailable, match=r"netns cannot\. uml cannot"):
            measure.substrate_for(specs)


def test_an_archive_of_other_runs_than_the_file_names_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E.g. of another rate. More repeats are the same runs."""
    text = 'title = "t"\n[base]\nlink = { rate = "RATE" }\n[axes]\nmode = ["ring", "ddp"]\n'
    path, archive = tmp_path / "few.toml", tmp_path / "few.tar.xz"
    monkeypatch.setattr(measure, "code_commit", lambda *_: "abc")
    monkeypatch.setattr(measure, "SWEEPS", tmp_path)
    folder = tmp_path / "few"
    make_run(folder / "ring", experiment="few")

    def missing(measured: str, asked: str) -> bool:
        path.write_text(text.replace("RATE", measured))
        experiment = Experiment.read(path).model_copy(update={"repeats": 3})
        (folder / EXPERIMENT).write_text(experiment.model_dump_json())
        measure.pack(folder, [folder / "ring"], archive, {"commit": "abc", "repeats": 3})
        path.write_text(text.replace("RATE", asked))
        return measure._experiment(path).missing

    assert not missing("100mbit", "100mbit") and missing("10mbit", "100mbit")


def test_a_stored_result_of_another_commit_or_of_a_changed_tree_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(stored: str) -> bool:
        monkeypatch.setattr(measure, "facts", lambda _: {"commit": stored})
        monkeypatch.setattr(measure, "code_commit", lambda *_: "abc")
        monkeypatch.setattr(measure, "archived_cells", lambda _: measure.cells(Experiment.read(R3)))
        return measure._experiment(R3).missing

    assert [missing(stored) for stored in ("abc", "def", "abc" + DIRTY, "")] == [False, True, True, True]


def test_every_experiment_and_every_part_is_an_item_with_its_time() -> None:
    found = measure.items()
    names = {path.stem for path in (ROOT / "experiments").glob("*.toml")} - {"tuned"}
    assert sorted(item.name for item in found) == sorted([*names, *(set(measure.PARTS) - set(measure.FOR_A_CHANGE))])
    assert all(item.minutes for item in found)


def test_a_result_with_fewer_repeats_is_missing_and_takes_so_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "code_commit", lambda *_: "abc")
    monkeypatch.setattr(measure, "archived_cells", lambda _: measure.cells(Experiment.read(R3)))

    def item(stored: int | None, repeats: int) -> measure.Item:
        kept = {"commit": "abc"} | ({} if stored is None else {"repeats": stored})
        monkeypatch.setattr(measure, "facts", lambda _: kept)
        return measure._experiment(R3, repeats)

    assert [item(None, 1).missing, item(None, 3).missing, item(3, 3).missing, item(3, 1).missing] == [
        *(False, True, False, False)
    ]
    assert item(None, 3).minutes == 3 * (item(None, 1).minutes or 0)


@pytest.fixture
def sweep_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`sweep_few(repeats)` returns the result, what the archive says, the names of runs, and the fetched data sets.

    `busy`: cores that others used during each run of ring, one sweep after the other. `commits`: as they are read.
    """
    folder, archive, path = tmp_path / "runs" / "few", tmp_path / "results" / "few.tar.xz", tmp_path / "few.toml"
    path.write_text(
        'title = "t"\n[base]\ndata = { name = "mnist" }\nlink = { rate = "500mbit" }\n[axes]\nmode = ["ring", "ddp"]\n'
    )
    fetched: list[str] = []
    made: list[str] = []

    def run(repeats: int = 1, now: bool = False, busy: Sequence[float] = (0, 0), commits: str = "a") -> SimpleNamespace:
        beside, read = iter(busy), itertools.cycle(commits)

        def make(experiment: Any, on: str) -> Any:
            others = next(beside)
            for spec in experiment.runs():
                if not (folder / spec.name).exists():
                    made.append(spec.name)
                    summary = make_run(
                        folder / spec.name, mode=str(spec.mode), experiment="few", link={"rate": "500mbit"}
                    )
                    load = MachineLoad(ranks=[0], cores=2, others=others if "ring" in spec.name else 0)
                    RunFolder(folder / spec.name).summary.write_text(
                        summary.model_copy(update={"machines": [load]}).model_dump_json(by_alias=True)
                    )
            (folder / EXPERIMENT).write_text(experiment.model_dump_json())
            folders = [folder / spec.name for spec in experiment.runs()]
            runs = [SimpleNamespace(folder=each, summary=Summary.read(RunFolder(each))) for each in folders]
            return FakeRuns(runs, folder)

        monkeypatch.setattr(measure, "fetch", lambda name, *_: fetched.append(name))
        monkeypatch.setattr(measure, "wait_until_quiet", lambda: None)
        monkeypatch.setattr(measure.api, "sweep", make)
        monkeypatch.setattr(measure, "code_commit", lambda *_: next(read))
        monkeypatch.setattr(measure, "ROOT", tmp_path)
        monkeypatch.setenv("TESTBED_RUNS", "")
        done = measure.sweep(path, archive, repeats, now)
        return SimpleNamespace(done=done, facts=measure.facts(archive), archive=archive, made=made, fetched=fetched)

    return run


def test_a_sweep_makes_every_run_as_often_as_asked_and_its_archive_says_so(sweep_few: Any) -> None:
    found = sweep_few(3)
    assert found.done and found.fetched == ["mnist"]
    assert found.facts["repeats"] == 3 and found.facts["machine"] and found.facts["substrate"] == "netns"
    with tarfile.open(found.archive) as tar:
        assert len([name for name in tar.getnames() if name.endswith("/spec.json")]) == 6


def test_a_disturbed_run_is_made_once_more_and_is_missing_if_it_is_disturbed_again(
    sweep_few: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_few(busy=(1.0, 1.0)).done is False
    printed = capsys.readouterr().out
    assert "once more, because other processes ran beside: ring" in printed and "few: not written" in printed
    again = sweep_few(busy=(1.0, 0.0))
    assert again.done and again.made == ["ring", "ddp", "ring", "ring"], "ddp was not disturbed"


def test_a_disturbed_run_is_accepted_if_times_do_not_matter(sweep_few: Any) -> None:
    assert sweep_few(now=True, busy=(1.0,)).done


def test_nothing_is_written_if_the_code_changed_meanwhile(sweep_few: Any) -> None:
    found = sweep_few(commits="ab")
    assert not found.done and not found.archive.exists()


class FakeRuns(list[Any]):
    errors = ()

    def __init__(self, runs: list[Any], folder: Path) -> None:
        super().__init__(runs)
        self.folder = folder


def test_it_waits_for_several_quiet_samples_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    shares = iter([0.9, 0.05, 0.5, 0.05, 0.05, 0.05, 0.9])
    measure.wait_until_quiet(shares)
    assert list(shares) == [0.9]
    assert capsys.readouterr().out == "waiting: 90% of the processors are in use, at most 10% may be\n"


def test_it_does_not_wait_for_ever_and_says_again_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="after 120 minutes 90% of the processors are in use"):
        measure.wait_until_quiet(itertools.repeat(0.9))
    assert capsys.readouterr().out.count("waiting: 90%") == 12


@pytest.mark.parametrize(
    ("status", "faults", "wanted"), [("ok", [], True), ("failed", [], False), ("invalid", [], False)]
)
def test_a_run_that_failed_is_a_result_only_with_faults(status: str, faults: list[str], wanted: bool) -> None:
    spec = {"mode": "ring", "link": {"rate": "100mbit"}}
    assert measure._as_wanted(Summary(spec=RunSpec.load(spec, ""), status=status)) is wanted
    with_fault = RunSpec.load(spec | {"faults": ["kill:rank2@step3"]}, "")
    assert measure._as_wanted(Summary(spec=with_fault, status=status)) is (status != "invalid")
