"""What the controller does for a user's own script."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from testbed.control.machine import ownership
from testbed.control.runs import scripts
from testbed.results.folder import RunFolder
from testbed.spec.errors import UsageError
from testbed.spec.run import RunSpec
from testbed.spec.script import ScriptSpec


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


def test_a_method_of_the_users_own_is_copied_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "my_way.py").write_text("def mean_(buffer, group): pass")
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path / "methods"))
    for mode, copied in (("ring", False), ("my-way", True)):
        script = {"argv": ["python", "main.py"], "folder": "/"}
        spec = RunSpec.load({"mode": mode, "nodes": 2, "batch_per_rank": 1, "script": script}, "")
        folder = RunFolder(tmp_path)
        folder.methods = tmp_path / mode
        scripts.put_method(spec, folder)
        assert (folder.methods / "my_way.py").is_file() is copied
