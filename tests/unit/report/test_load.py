"""Loading: what is whole is read, what is not is named and skipped, and nothing is ever a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.report.load import find, load, natural
from testbed.report.model import chapters
from testbed.spec.errors import SpecError
from testbed.spec.run import SCHEMA
from tests.support.synthetic import make_run

RATE: dict[str, Any] = {"link": {"rate": "500mbit"}}


def test_runs_below_a_folder_are_found_and_what_a_sweep_set_aside_is_not(tmp_path: Path) -> None:
    for name in ("quick/ring", "quick/.superseded/ring~0", "other/deep/ddp"):
        make_run(tmp_path / name, name="run", mode=name.rpartition("/")[2].strip("~0"))
    assert [str(path.relative_to(tmp_path)) for path in find(tmp_path)] == ["other/deep/ddp", "quick/ring"]


def test_a_folder_named_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert len(load([tmp_path, tmp_path / "a"]).runs) == 1


def test_names_with_numbers_sort_as_numbers() -> None:
    assert sorted(["n10", "n2", "n1"], key=natural) == ["n1", "n2", "n10"]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load([tmp_path / "nowhere"])


@pytest.mark.parametrize("status", ["invalid", "failed", "interrupted"])
def test_a_run_that_does_not_count_is_listed_with_its_reason(tmp_path: Path, status: str) -> None:
    make_run(tmp_path / "bad", status=status, reason="rank 2 died")
    loaded = load([tmp_path])
    assert loaded.runs == [] and f"{status}: rank 2 died" in loaded.skipped[0].reason


def test_a_strangers_reason_is_one_line_that_commands_no_terminal_and_ends(tmp_path: Path) -> None:
    make_run(tmp_path / "bad", status="failed", reason="rank 2 \x1b]0;owned\x07" + "x" * 100_000)
    (skipped,) = load([tmp_path]).skipped
    assert skipped.reason.startswith("failed: rank 2 ?]0;owned?xxx")
    assert skipped.reason.isprintable() and len(skipped.reason) < 500


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(key: str, value: Any) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[4][key] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return do


def to_link(path: Path) -> None:
    """The same content, but it lies elsewhere."""
    path.symlink_to(path.replace(path.parent.parent / f"{path.name}.elsewhere"))


def endless(path: Path) -> None:
    """Large, and on no disk."""
    path.touch()
    os.truncate(path, (16 << 20) + 1)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no summary": ("summary.json", Path.unlink, "no summary.json"),
    "half a summary": ("summary.json", cut, "damaged"),
    "half a spec": ("spec.json", cut, "not JSON"),
    "a receipt that is none": ("receipt.json", lambda p: p.write_text("[1]"), "receipt"),
    "half a receipt": ("receipt.json", cut, "damaged"),
    "a rank without an end": ("rank1.jsonl", cut, "rank 1 did not finish"),
    "a rank's file gone": ("rank1.jsonl", Path.unlink, "rank1.jsonl"),
    "no text at all": ("rank1.jsonl", lambda p: p.write_bytes(b"\xff\xfe\x00\n"), "damaged"),
    "another schema": ("spec.json", lambda p: p.write_text(json.dumps({"schema": SCHEMA + 1})), f"schema {SCHEMA + 1}"),
    "a negative time": ("rank0.jsonl", change("total", -1.0), "total"),
    "a time that is no number": ("rank0.jsonl", change("busy", "long"), "damaged"),
    "an endless time": ("rank0.jsonl", change("at", float("inf")), "at has a value"),
    "a step left out": ("rank0.jsonl", change("step", 7), "out of order"),
    "comm of another shape": ("rank0.jsonl", change("comm", [[1, 2]]), "damaged"),
    "phases that are none": ("rank0.jsonl", change("phases", 5), "damaged"),
    "a link for a rank's records": ("rank1.jsonl", lambda p: to_link(p), "is a link"),
    "a link for a receipt": ("receipt.json", lambda p: to_link(p), "is a link"),
    "a link that nobody would read": ("notes", lambda p: p.symlink_to("/etc/passwd"), "is a link"),
    "a pipe": ("rank9.log", lambda p: os.mkfifo(p), "no plain file"),
    "records without end": ("rank1.jsonl", lambda p: os.truncate(p, (128 << 20) + 1), "at most 134217728 are read"),
    "a receipt without end": ("receipt.json", lambda p: os.truncate(p, (16 << 20) + 1), "at most 16777216 are read"),
    "a profile without end": ("rank0.profile.json", lambda p: endless(p), "at most 16777216 are read"),
    "a nest of brackets": ("receipt.json", lambda p: p.write_text("[" * 100_000), "damaged"),
}


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_is_named_and_skipped(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    make_run(tmp_path / "good", **RATE)
    make_run(tmp_path / "bad", **RATE)
    damage(tmp_path / "bad" / name)
    loaded = load([tmp_path])
    assert [run.folder.path.name for run in loaded.runs] == ["good"]
    (skipped,) = loaded.skipped
    assert skipped.path.name == "bad" and words in skipped.reason and "\n" not in skipped.reason


def test_folders_that_the_user_linked_are_read(tmp_path: Path) -> None:
    make_run(tmp_path / "disk" / "quick" / "ring", mode="ring", **RATE)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one").symlink_to(tmp_path / "disk" / "quick" / "ring")
    for path in (tmp_path / "runs", tmp_path / "mine", tmp_path / "mine" / "one"):
        loaded = load([path])
        assert len(loaded.runs) == 1 and loaded.skipped == []


@pytest.mark.parametrize("spoil", [to_link, lambda p: os.truncate(p, (16 << 20) + 1)], ids=["link", "endless"])
def test_a_question_that_is_a_link_or_endless_is_not_read_and_the_runs_are(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    make_run(tmp_path / "quick" / "ring", mode="ring", **RATE)
    question = tmp_path / "quick" / "experiment.json"
    question.write_text(json.dumps({"name": "adhoc", "title": "a question"}))
    assert load([tmp_path / "quick"]).experiments["adhoc"].title == "a question"
    spoil(question)
    loaded = load([tmp_path / "quick"])
    assert len(loaded.runs) == 1 and loaded.experiments == {}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_rot_never_raise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("rot") / "run"
    make_run(folder, nodes=2, steps=4, **RATE)
    name = data.draw(st.sampled_from(["spec.json", "summary.json", "receipt.json", "rank0.jsonl", "rank1.jsonl"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(bytes(content))
    loaded = load([folder])
    assert len(loaded.runs) + len(loaded.skipped) == 1
    for chapter in chapters(loaded):  # what was let through can be worked with
        assert chapter.cells[0].seconds.n > 0


def test_worker_counts_sort_as_numbers(tmp_path: Path) -> None:
    for nodes in (16, 2, 4):
        make_run(tmp_path / f"ring-{nodes}", mode="ring", nodes=nodes, steps=4)
    (chapter,) = chapters(load([tmp_path]))
    assert [cell.world for cell in chapter.cells] == [2, 4, 16]
