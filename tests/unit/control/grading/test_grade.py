"""Grading without nodes: which folders are submissions, which files of theirs are taken, and what failures do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.control.grading import grade
from testbed.control.grading.evidence import Outside
from testbed.control.grading.grade import CounterReader, Setting, check_trust, find_submissions, grade_all
from testbed.control.runs.progress import Silent
from testbed.control.substrates.base import NodeCounts
from testbed.control.substrates.fake import FakeProcess, FakeSubstrate
from testbed.spec.errors import Interrupted, NetworkInvalid, RankFailed, Unavailable, UsageError
from testbed.spec.file_tree import remove_tree
from testbed.spec.grading import Assignment
from tests.support.deep import make_deep_folder

PART = {"name": "1", "file": "a.py", "argv": ["python", "a.py"], "demands": [{"kind": "runs", "points": 2}]}
ASSIGNMENT = Assignment.load({"name": "a", "title": "t", "nodes": 1, "steps": 3, "parts": [PART]}, "a.toml")


def submissions(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / "in" / name).mkdir(parents=True)
        (folder / "in" / name / "a.py").write_text(f"print({name!r})")
    return find_submissions(folder / "in")


def setting(folder: Path, given: Path | None = None) -> Setting:
    return Setting(ASSIGNMENT, given, folder / "out", "process", "", True, Silent())


def ending(outcomes: dict[str, Exception]) -> Callable[..., Any]:
    """Instead of a run: raise what is planned for the submission; the second argument of `print` names it."""

    def execute(spec: Any, choice: Any, folder: Any, progress: Any, node_observer: Any) -> Any:
        text = (Path(spec.script.folder) / "a.py").read_text()
        raise next(error for name, error in outcomes.items() if name in text)

    return execute


def test_submissions_are_folders(tmp_path: Path) -> None:
    found = submissions(tmp_path, "bob", "ann", ".hidden")
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    (tmp_path / "in" / "file").write_text("")
    assert [path.name for path in found] == ["ann", "bob"]
    assert find_submissions(tmp_path / "in") == found
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UsageError, match="one folder per submission"):
            find_submissions(wrong)


def test_only_a_sandbox_is_used_unless_submissions_are_trusted() -> None:
    assert check_trust("auto", trusted=False) == check_trust("compose", trusted=False) == "compose"
    assert check_trust("process", trusted=True) == "process"
    for on in ("process", "netns"):
        with pytest.raises(UsageError, match=r"is no sandbox.*--on compose"):
            check_trust(on, trusted=False)
    with pytest.raises(UsageError, match="cannot grade"):
        check_trust("hosts", trusted=True)


def test_links_and_pipes_of_a_submission_are_not_taken_and_given_files_win(tmp_path: Path) -> None:
    (own,) = submissions(tmp_path, "ann")
    (tmp_path / "secret").write_text("secret")
    (own / "link").symlink_to(tmp_path / "secret")
    (own / "folder").symlink_to(tmp_path)
    os.mkfifo(own / "pipe")
    (own / "starter.py").write_text("forged")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "starter.py").write_text("ours")
    assert grade._stage(own, tmp_path / "given", tmp_path / "files") == ""
    assert sorted(path.name for path in (tmp_path / "files").rglob("*")) == ["a.py", "starter.py"]
    assert (tmp_path / "files" / "starter.py").read_text() == "ours"


def test_a_folder_in_place_of_a_given_file_is_removed(tmp_path: Path) -> None:
    (own,) = submissions(tmp_path, "ann")
    (own / "starter.py").mkdir()
    (own / "starter.py" / "x").write_text("in the way")
    (own / "lib").write_text("in the way")
    (tmp_path / "given" / "lib").mkdir(parents=True)
    for name in ("starter.py", "lib/x.py"):
        (tmp_path / "given" / name).write_text("ours")
    assert grade._stage(own, tmp_path / "given", tmp_path / "files") == ""
    assert [(tmp_path / "files" / name).read_text() for name in ("starter.py", "lib/x.py")] == ["ours", "ours"]


def test_a_submission_of_too_many_files_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "MAX_FILES", 2)
    (own,) = submissions(tmp_path, "ann")
    for number in range(3):
        (own / f"{number}").write_text("")
    book = grade_all(setting(tmp_path), [own])
    assert book.complete and "more than 2 files" in book.graded[0].verdicts[0].reason and book.graded[0].points == 0


def test_a_submission_of_any_depth_gets_nothing_and_the_next_one_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "execute", ending({"bob": RankFailed("exit 1")}))
    ann, bob = submissions(tmp_path, "ann", "bob")
    make_deep_folder(ann)
    book = grade_all(setting(tmp_path), [ann, bob])
    remove_tree(ann)  # pytest cannot
    assert "below more than 50 folders" in book.graded[0].verdicts[0].reason and book.graded[0].points == 0
    assert book.graded[1].verdicts[0].reason == "exit 1" and book.complete


def test_grading_goes_on_after_a_failed_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"ann": RankFailed("rank 0 was killed"), "bob": NetworkInvalid("tc failed"), "cy": RankFailed("exit 1")}
    monkeypatch.setattr(grade, "execute", ending(outcomes))
    book = grade_all(setting(tmp_path), submissions(tmp_path, *outcomes))
    ann, bob, cy = book.graded
    assert ann.verdicts[0].verdict == "not met" and ann.verdicts[0].reason == "rank 0 was killed"
    assert bob.problem == "tc failed" and not bob.verdicts, "the submission is not to blame"
    assert cy.verdicts[0].reason == "exit 1" and not book.complete


def test_an_interrupt_keeps_what_was_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "execute", ending({"ann": RankFailed("exit 1"), "bob": Interrupted("interrupted")}))
    with pytest.raises(Interrupted):
        grade_all(setting(tmp_path), submissions(tmp_path, "ann", "bob"))
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [each["name"] for each in document["submissions"]] == ["ann"] and document["complete"] is False


@pytest.mark.parametrize(("load", "verdict"), [(1e6, "not proven"), (0.0, "not met")])
def test_a_part_that_was_too_slow_on_a_busy_machine_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, verdict: str
) -> None:
    def execute(spec: Any, choice: Any, folder: Any, progress: Any, node_observer: CounterReader) -> Any:
        node_observer.seen = Outside(seconds=ASSIGNMENT.limits.seconds + 1)
        raise RankFailed("the script ran longer than its limit")

    monkeypatch.setattr(grade, "execute", execute)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    (given,) = grade_all(setting(tmp_path), submissions(tmp_path, "ann")).graded[0].verdicts
    assert given.verdict == verdict and given.points == 0 and "ran longer" in given.reason
    assert ("the machine was busy (load 1000000 on" in given.reason) is (load > 0)


def test_a_missing_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "in" / "ann").mkdir(parents=True)
    book = grade_all(setting(tmp_path), find_submissions(tmp_path / "in"))
    assert book.graded[0].verdicts[0].reason == "a.py is missing"


def test_a_file_in_a_folder_of_the_submission_is_named(tmp_path: Path) -> None:
    (own,) = submissions(tmp_path, "ann")
    (own / "hw2").mkdir()
    (own / "a.py").rename(own / "hw2" / "a.py")
    book = grade_all(setting(tmp_path), [own])
    (verdict,) = book.graded[0].verdicts
    assert verdict.verdict == "not met"
    assert verdict.reason == "a.py is in the folder hw2, and must be at the top of the submission"


def test_a_machine_that_cannot_run_a_part_is_refused_before_the_first_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker in it
    on_compose = replace(setting(tmp_path), on="compose")
    with pytest.raises(Unavailable, match="substrate compose: "):
        grade_all(on_compose, submissions(tmp_path, "ann"))
    assert not (tmp_path / "out").exists()


def test_a_hostile_name_becomes_a_plain_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "execute", ending({"print": RankFailed("exit 1")}))
    grade_all(setting(tmp_path), submissions(tmp_path, "Zoë; rm -rf $HOME"))
    names = [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert names == ["001-Zo_rm_-rf_HOME"] or names == ["001-Zo_rm_-rf__HOME"], names


def test_a_reader_of_counters_counts_what_was_added_while_the_ranks_ran() -> None:
    substrate, reader = FakeSubstrate(2), CounterReader()
    counts = {0: NodeCounts(sent=100, received=10, unreachable=1), 1: NodeCounts()}
    substrate.counts = counts.__getitem__  # type: ignore[method-assign]
    reader.begin(substrate)
    counts[0] = NodeCounts(sent=350, received=20, unreachable=3)
    reader.end(substrate, [FakeProcess(1, code=0), FakeProcess(2)])
    first, second = reader.seen.nodes
    assert (first.code, first.sent, first.received, first.unreachable) == (0, 250, 10, 2)
    assert (second.code, second.sent) == (None, None) and not reader.seen.counted


def test_records_behind_a_link_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="symlink"):
        grade._read_records(tmp_path / "run", 1)
