"""The working copy of a script, and what is collected from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.attach import workplace
from testbed.attach.workplace import Workplace, offer
from tests.support.deep import make_deep_folder

ME = (os.geteuid(), os.getegid())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    (made / "sub").mkdir(parents=True)
    (made / ".git").mkdir()
    (made / ".git" / "config").write_text("secret")
    (made / "main.py").write_text("print(1)")
    (made / "sub" / "data.bin").write_bytes(b"x" * 10)
    (made / "link").symlink_to("main.py")
    return made


def test_a_working_copy_has_the_folders_content_without_git(folder: Path) -> None:
    with Workplace(folder, ME, exclude=["*.bin"]) as place:
        assert (place.work / "main.py").read_text() == "print(1)" and (place.work / "link").is_symlink()
        assert not (place.work / ".git").exists() and not (place.work / "sub" / "data.bin").exists()
        assert place.root.stat().st_mode & 0o777 == 0o711
    assert not place.root.exists()


def test_the_python_path_has_nothing_but_the_observer(folder: Path) -> None:
    with Workplace(folder, ME) as place:
        assert sorted(each.name for each in place.python.iterdir()) == ["sitecustomize.py", "testbed"]
        assert (place.python / "testbed" / "attach" / "observer.py").is_file()
        assert not (place.python / "testbed" / "control").exists()


def test_a_folder_of_a_dead_controller_can_be_found(folder: Path) -> None:
    with Workplace(folder, ME, mark="7-8-0123456789abcdef") as place:
        assert place.root.name.startswith("testbed-7-8-0123456789abcdef-script-")


def test_new_and_changed_files_are_collected(folder: Path, tmp_path: Path) -> None:
    with Workplace(folder, ME) as place:
        (place.work / "sub" / "model.pt").write_bytes(b"1234")
        (place.work / "main.py").write_text("print(2) # longer")
        found = place.collect(tmp_path / "out")
    assert (found.count, found.bytes, found.left_out) == (2, 4 + 17, 0)
    assert sorted(str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*.*")) == [
        "main.py",
        "sub/model.pt",
    ]


def test_links_and_pipes_are_not_collected(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    with Workplace(folder, ME) as place:
        (place.work / "out").symlink_to(outside)
        os.link(outside, place.work / "hard")
        os.mkfifo(place.work / "pipe")
        (place.work / "folder").symlink_to("/etc")
        found = place.collect(tmp_path / "out")
    assert (found.count, found.left_out) == (0, 3) and "regular files" in found.reasons[0]
    assert not (tmp_path / "out").exists()


def test_size_and_number_are_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "MAX_COLLECTED_FILES", 3)
    monkeypatch.setattr(workplace, "MAX_COLLECTED_BYTES", 100)
    with Workplace(folder, ME) as place:
        (place.work / "a-large").write_bytes(b"x" * 101)
        for number in range(4):
            (place.work / f"b{number}").write_bytes(b"x")
        found = place.collect(tmp_path / "out")
    assert (found.count, found.left_out, len(found.reasons)) == (3, 2, 2)
    assert found.names == ["b0", "b1", "b2"]


def test_a_folder_of_any_depth_is_left_out_and_removed(folder: Path, tmp_path: Path) -> None:
    with Workplace(folder, ME) as place:
        make_deep_folder(place.work)
        (place.work / "result").write_text("1")
        found = place.collect(tmp_path / "out")
    assert (found.count, found.left_out) == (1, 1) and "more than 50 folders" in found.reasons[0]
    assert not place.root.exists()


def test_a_file_that_cannot_be_read_is_left_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may forbid its folders to its own user, who collects the files if the testbed is not run by root."""

    def refuse(relative: str, *_: object) -> str:
        if relative == "closed":
            raise PermissionError(13, "Permission denied")
        return ""

    monkeypatch.setattr(workplace, "_why_left_out", refuse)
    with Workplace(folder, ME) as place:
        for name in ("closed", "result"):
            (place.work / name).write_text("1")
        found = place.collect(tmp_path / "out")
    assert (found.names, found.left_out, found.reasons) == (["result"], 1, ["could not be copied (Permission denied)"])


def test_a_folder_without_permissions_is_removed(folder: Path) -> None:
    with Workplace(folder, ME) as place:
        (place.work / "sub").chmod(0)
    assert not place.root.exists()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "own" / "torchvision"
    (root / "MNIST" / "raw").mkdir(parents=True)
    (root / "MNIST" / "raw" / "images").write_text("ours")
    monkeypatch.setattr(workplace, "layouts", lambda data, scratch: {"mnist": root})
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def linked(work: Path, *places: str) -> dict[str, object]:
    return offer(work.parent / "own", work, places, work.parent)


def test_data_is_linked_at_every_place_and_the_folders_above_belong_to_the_script(work: Path) -> None:
    found = linked(work, "data", "some/where")
    assert (work / "data/MNIST/raw/images").read_text() == (work / "some/where/MNIST/raw/images").read_text() == "ours"
    assert (work / "data/MNIST/raw").is_symlink() and not (work / "data/MNIST").is_symlink()
    assert set(found) == {"mnist"} and set(found["mnist"]["digests"]) >= {"train_images"}  # type: ignore[index]


def test_what_the_script_brings_stays(work: Path) -> None:
    (work / "data/MNIST/raw").mkdir(parents=True)
    (work / "data/MNIST/raw/images").write_text("theirs")
    linked(work, "data")
    assert (work / "data/MNIST/raw/images").read_text() == "theirs"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_written_through_a_link_or_over_a_file(work: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if kind == "link":
        (work / "data").symlink_to(outside)
    else:
        (work / "data").write_text("a file")
    linked(work, "data")
    assert list(outside.iterdir()) == [] and (kind == "link" or (work / "data").read_text() == "a file")
