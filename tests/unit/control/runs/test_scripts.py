"""What the controller does for a user's own script."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.control.machine import ownership
from testbed.control.runs import scripts
from testbed.control.runs.scripts import Allowance, size_of
from testbed.control.runs.supervisor import RankState, Tail
from testbed.control.substrates.fake import FakeProcess
from testbed.results.folder import RunFolder
from testbed.spec.errors import RankFailed, UsageError
from testbed.spec.run import RunSpec
from testbed.spec.script import Limits, ScriptSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "main.py").write_text("")
    return tmp_path


def script(folder: Path, *argv: str, **more: object) -> ScriptSpec:
    return ScriptSpec.load({"argv": argv, "folder": str(folder), "path": "/usr/bin:/bin"} | more, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("sh", "nope.py"), r"script 'nope.py': there is no such file in .*Start testbed in"),
        (("python3", "-u", "nope"), "script 'nope': there is no such file"),
        (("no-such-command", "main.py"), "command 'no-such-command': there is no such command. PATH is /usr/bin:/bin"),
    ],
)
def test_what_cannot_be_started_is_refused(folder: Path, argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scripts.check(script(folder, *argv), here=True)


def test_commands_of_other_machines_are_not_looked_for_here(folder: Path) -> None:
    scripts.check(script(folder, "no-such-command", "main.py"), here=False)
    scripts.check(script(folder, "sh", "main.py"), here=True)


def test_a_variable_is_handed_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = script(folder, "sh", "main.py", handed=["MY_TOKEN"])
    with pytest.raises(UsageError, match=r"variable 'MY_TOKEN': is not set here. Write --env MY_TOKEN=VALUE"):
        scripts.handed(asked)
    monkeypatch.setenv("MY_TOKEN", "t")
    assert scripts.handed(asked) == {"MY_TOKEN": "t"}


def test_working_copies_that_are_left_are_removed() -> None:
    left = Path(tempfile.mkdtemp(prefix=f"{ownership.owned_name('script')}-"))
    other = Path(tempfile.mkdtemp(prefix="testbed-script-"))
    with scripts.copies_removed():
        (left / "file").write_text("")
    assert not left.exists() and other.exists()
    other.rmdir()


def test_files_that_were_left_out_are_named(tmp_path: Path) -> None:
    values = {"argv": ["python", "main.py"], "folder": "/mine"}
    spec = RunSpec.load({"mode": "script", "nodes": 2, "batch_per_rank": 1, "script": values}, "")
    run = RunFolder(tmp_path)
    for rank in range(2):
        files = {"kind": "files", "count": 3, "bytes": 30, "left_out": rank, "reasons": ["at most 3 files"]}
        run.records(rank).write_text(json.dumps(files) + "\n")
    expected = ["rank 1: 3 files (30 bytes) are in rank1.files, 1 are not: at most 3 files"]
    assert scripts.notes(spec, run) == expected


class Counting:
    polls = 0

    def poll(self, ranks: Sequence[RankState]) -> None:
        self.polls += 1


def rank(folder: Path, code: int | None = None) -> RankState:
    state = RankState(FakeProcess(1), Tail(folder / "rank0.jsonl"))
    state.code = code
    return state


def test_a_script_that_runs_too_long_is_ended(tmp_path: Path) -> None:
    watch = Allowance(Limits(seconds=1e-9), tmp_path, Counting())
    with pytest.raises(RankFailed, match="ran longer than 1e-09 s, which is its limit"):
        watch.poll([rank(tmp_path)])
    watch.poll([rank(tmp_path, code=0)])  # it has ended


def test_a_run_folder_that_grows_too_large_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "SIZE_EVERY_S", -1.0)
    inner = Counting()
    watch = Allowance(Limits(disk=1 << 20), tmp_path, inner)
    watch.poll([rank(tmp_path)])
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(RankFailed, match="larger than 1 MiB, which is its limit"):
        watch.poll([rank(tmp_path)])
    assert inner.polls == 2


def test_a_script_without_limits_runs_on(tmp_path: Path) -> None:
    inner = Counting()
    Allowance(None, tmp_path, inner).poll([rank(tmp_path)])
    assert inner.polls == 1


def test_a_link_counts_as_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/kcore")
    assert size_of(tmp_path) < 1000
