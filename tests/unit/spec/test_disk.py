"""A full disk is reported with its file system, the free space and the way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from testbed.spec.disk import file_system, full_disk, is_full, nearly_full, os_failure
from testbed.spec.errors import TestbedError
from testbed.spec.words import Place, set_place


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_its_free_space_and_the_way_out(number: int, tmp_path: Path) -> None:
    error = OSError(number, "no room", str(tmp_path / "summary.json"))
    found = str(os_failure(error, "elsewhere"))
    assert found.startswith(f"{tmp_path}/summary.json: no room (file system /") and "MB free)" in found
    assert "Make room there, then try again" in found and "--resume" in found
    assert is_full(error) and os_failure(error, "").exit_code == TestbedError.exit_code


def test_another_failure_of_the_machine_names_the_file_and_the_way_out() -> None:
    error = OSError(errno.EIO, "I/O error")
    said = "here: I/O error, so nothing was finished. Remove the cause, then try again."
    assert str(os_failure(error, "here")) == said
    assert not is_full(error) and not is_full(ValueError())


def test_the_file_system_of_a_path_that_does_not_exist_is_that_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: now)  # others may write or remove files between two calls
    assert file_system(tmp_path / "not" / "yet") == file_system(tmp_path) != ""
    assert full_disk(tmp_path / "x").startswith(f"{tmp_path}/x: No space left on device (file system /")


def test_a_disk_with_room_is_not_nearly_full(tmp_path: Path) -> None:
    assert not nearly_full(tmp_path)
    assert not nearly_full(tmp_path / "none")


def test_in_a_container_the_file_system_has_the_name_that_the_user_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_RUNS", str(tmp_path))
    set_place(Place.COMPOSE)
    try:
        message = full_disk(tmp_path / "compose" / "x")
    finally:
        set_place(Place.COMMAND_LINE)
    assert message.startswith("./runs/compose/x: No space left on device (file system /")
    assert message.endswith("Make room there, then try again.")
