"""What a sandbox hides and shows. It is entered for real in tests/gloo and tests/net."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testbed.attach import sandbox
from testbed.attach.sandbox import command, covers, hidden_ancestor, interpreter_paths, run
from testbed.spec.privileges import NOBODY


def test_a_program_needs_the_folders_of_its_links_and_interpreters(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.symlink_to(sys.executable)
    tool = tmp_path / "env" / "bin" / "torchrun"
    tool.write_text(f"#!{python}\n")
    tool.chmod(0o755)
    found = interpreter_paths("torchrun", str(tool.parent))
    assert found[0] == found[1] == tmp_path / "env" and Path(sys.executable).parent.parent in found


def test_a_folder_that_the_user_may_not_enter_is_covered(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "venv"
    inner.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            return  # the test's own folder is closed to others
    (tmp_path / "closed").chmod(0o700)
    assert hidden_ancestor(inner, NOBODY) == tmp_path / "closed"
    assert covers([inner, Path("/usr")], NOBODY, []) == {tmp_path / "closed": [inner]}


def test_homes_are_covered_but_for_what_is_needed(tmp_path: Path) -> None:
    home, venv = tmp_path / "home", tmp_path / "home" / "venv"
    (venv / "lib").mkdir(parents=True)
    uid = os.geteuid()
    assert covers([venv, venv / "lib"], uid, [home])[home] == [venv]
    assert covers([], uid, [home]) == {home: []}
    assert home not in covers([home], uid, [home])  # needed as a whole


def test_another_user_than_root_keeps_his_rights_and_gains_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = command((1000, 1000), [], Path("/work"), ["python", "main.py"], 3)
    assert "--no-new-privs" in found and "unshare" not in found and found[-2:] == ["python", "main.py"]


def test_a_launcher_of_another_user_gives_the_script_none_of_its_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65533)
    found = " ".join(command((NOBODY, NOBODY), [], Path("/work"), ["python", "main.py"], 3))
    assert f"--reuid {NOBODY} --regid {NOBODY} --clear-groups --bounding-set=-all --inh-caps=-all" in found
    # the signal is requested after the user is changed, which would cancel it
    assert found.endswith("-- setpriv --pdeathsig KILL -- python main.py")


def test_root_needs_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_can_unshare", lambda: True)
    found = command((1000, 100), [Path("/opt/env")], Path("/work"), ["python", "main.py"], 5)
    assert found[:5] == ["setpriv", "--pdeathsig", "KILL", "--", "unshare"]
    options = "--user 1000:100 --writable /work --variables 5 --needs /opt/env"
    assert f" {options} -- python main.py" in " ".join(found)
    assert found[found.index(sys.executable) + 1] == "-I"  # imports nothing from the script's folder


def test_the_code_of_the_script_is_returned() -> None:
    assert run(["sh", "-c", "exit 7"]) == 7
    assert run(["sh", "-c", "kill -SEGV $$"]) == 128 + 11


def test_in_a_user_namespace_the_script_is_its_user_again_without_rights_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "alone_as", lambda *file: 1000)
    found = " ".join(command((0, 0), [], Path("/work"), ["python", "main.py"], 3))
    assert found.startswith("unshare --user --map-user=1000 --map-group=1000 -- setpriv --pdeathsig KILL -- ")
    assert "--no-new-privs" in found and found.endswith("-- python main.py")
