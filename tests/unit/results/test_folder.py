"""RunFolder: files appear whole or not at all, and no run overwrites another."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from testbed.results.folder import (
    RunFolder,
    check_size,
    find_runs,
    fresh_folder,
    natural,
    read_bounded,
    runs_dir,
    write_whole,
)
from testbed.spec.errors import SpecError, TestbedError, UsageError
from testbed.spec.file_tree import remove_tree
from testbed.spec.run import RunSpec
from tests.support.deep import make_deep_folder
from tests.support.synthetic import make_run

SPEC = RunSpec.load({"nodes": 2, "model": "lenet5"}, "here")


def test_names_inside_a_run_folder_are_a_scheme(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [p.name for p in (folder.spec, folder.records(0), folder.log(3), folder.receipt, folder.summary)]
    assert names == ["spec.json", "rank0.jsonl", "rank3.log", "receipt.json", "summary.json"]


def test_a_created_folder_holds_its_spec_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create(SPEC)
    assert folder.read_spec() == SPEC
    assert [p.name for p in folder.path.iterdir()] == ["spec.json"]
    assert folder.read_substrate() == ""


def test_a_folder_says_on_which_substrate_its_run_began(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(SPEC, "netns")
    assert folder.read_substrate() == "netns" and folder.read_spec() == SPEC
    assert sorted(p.name for p in folder.path.iterdir()) == ["spec.json", "substrate.txt"]


def test_an_existing_folder_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "mine").write_text("x")
    with pytest.raises(UsageError, match=r"run folder .*run exists, and a run never overwrites another\. Give another"):
        folder.create(SPEC)
    assert [p.name for p in folder.path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be made .*Set TESTBED_RUNS or --out"):
        RunFolder(tmp_path / "file" / "run").create(SPEC)


def test_a_folder_without_a_readable_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r": has no spec\.json, so it is no run folder\. Give a folder that `testbed run`"
    ):
        RunFolder(tmp_path).read_spec()
    (tmp_path / "spec.json").write_bytes(b"\xff\x00")
    with pytest.raises(UsageError, match=r"spec\.json: not JSON"):
        RunFolder(tmp_path).read_spec()


def test_setting_aside_keeps_everything_under_a_new_name(tmp_path: Path) -> None:
    places = []
    for attempt in range(3):
        folder = RunFolder(tmp_path / "ring")
        folder.path.mkdir()
        (folder.path / "attempt").write_text(str(attempt))
        places.append(folder.set_aside())
        assert not folder.path.exists()
    assert [place.name for place in places] == ["ring~0", "ring~1", "ring~2"]
    assert [(place / "attempt").read_text() for place in places] == ["0", "1", "2"]
    assert {p.name for p in tmp_path.iterdir()} == {".superseded"}


def test_setting_aside_never_lands_inside_an_older_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "ring")
    (tmp_path / ".superseded" / "ring~1").mkdir(parents=True)  # ring~0 was deleted by hand
    for _ in range(2):
        folder.path.mkdir()
        place = folder.set_aside()
    assert place.name == "ring~2"
    assert list((tmp_path / ".superseded" / "ring~1").iterdir()) == []


def test_attempts_are_counted_on_and_read_oldest_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.set_records_aside(1) is None and folder.attempts(1) == {}
    for number in range(1, 12):
        folder.records(1).write_text(str(number))
        assert folder.set_records_aside(1) == tmp_path / f"rank1.attempt{number}.jsonl"
    for strange in ("rank1.attempt.jsonl", "rank1.attemptx.jsonl", "rank11.attempt1.jsonl", "rank1.attempt3.jsonl.bak"):
        (tmp_path / strange).write_text("no")
    (tmp_path / "rank1.attempt1.jsonl").unlink()  # by hand: the next is still the newest
    folder.records(1).write_text("12")
    folder.set_records_aside(1)
    assert [(number, path.read_text()) for number, path in folder.attempts(1).items()] == [
        (number, str(number)) for number in range(2, 13)
    ]


def test_a_disk_that_is_full_leaves_no_half_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("testbed.results.folder.write_whole", full)
    with pytest.raises(TestbedError, match=r"r/spec\.json: No space left on device.*Make room") as error:
        RunFolder(tmp_path / "r").create(SPEC)
    assert error.value.exit_code == TestbedError.exit_code and not (tmp_path / "r").exists()


def test_a_reader_sees_the_old_text_or_the_new_one_never_half(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    texts = {character * 200_000 + "\n" for character in "ab"}
    write_whole(path, "a" * 200_000)
    stop, seen = threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(50):
        for character in "ba":
            write_whole(path, character * 200_000)
    stop.set()
    reader.join()
    assert seen <= texts
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_what_is_written_is_readable_by_others(tmp_path: Path) -> None:
    write_whole(tmp_path / "spec.json", "{}")
    assert (tmp_path / "spec.json").stat().st_mode & 0o777 == 0o644


def test_runs_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTBED_RUNS", raising=False)
    assert runs_dir() == Path("runs")
    monkeypatch.setenv("TESTBED_RUNS", "/elsewhere")
    assert runs_dir() == Path("/elsewhere")


def test_a_fresh_folder_is_never_one_that_exists(tmp_path: Path) -> None:
    found = []
    for _ in range(3):
        found.append(fresh_folder(tmp_path, "ring-n4"))
        found[-1].mkdir()
    assert len(set(found)) == 3 and all(path.name.startswith("ring-n4-2") for path in found)


def test_half_written_files_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in (".summary.json.x1.tmp", ".hidden", "rank0.log.tmp", "checkpoints"):
        (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).touch()
    (tmp_path / "checkpoints" / ".rank0.x2.tmp").touch()
    RunFolder(tmp_path).tidy()
    assert {path.name for path in tmp_path.rglob("*")} == {".hidden", "rank0.log.tmp", "checkpoints"}


def test_what_a_script_has_written_stays_whatever_its_name(tmp_path: Path) -> None:
    for folder in (RunFolder(tmp_path).files(0), tmp_path):
        (folder / ".cache.tmp").mkdir(parents=True)
    (RunFolder(tmp_path).files(0) / ".mine.tmp").touch()
    RunFolder(tmp_path).tidy()
    names = {"rank0.files", "rank0.files/.cache.tmp", "rank0.files/.mine.tmp", ".cache.tmp"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == names


def test_a_folder_of_any_depth_is_searched(tmp_path: Path) -> None:
    """A script in a container may write to its run's folder."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    make_deep_folder(folder.path)
    folder.tidy()
    folder.check_no_links()
    remove_tree(folder.path)


def test_a_folder_with_a_link_or_a_pipe_in_it_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "checkpoints").mkdir(parents=True)
    folder.log(0).touch()
    folder.check_no_links()
    for make in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo):
        strange = folder.checkpoints / "strange"
        make(strange)
        with pytest.raises(SpecError, match=r"strange'?: is a symlink or not a regular file\. Remove it"):
            folder.check_no_links()
        strange.unlink()


def test_the_folder_itself_may_be_a_link_only_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    RunFolder(tmp_path / "link").check_no_links(allow_top=True)
    with pytest.raises(SpecError, match="is a symlink"):
        RunFolder(tmp_path / "link").check_no_links()
    (tmp_path / "real" / "spec.json").symlink_to("/etc/passwd")
    with pytest.raises(SpecError, match=r"spec\.json'?: is a symlink"):
        RunFolder(tmp_path / "link").check_no_links(allow_top=True)


def test_only_plain_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(SpecError, match="5 bytes, and at most 4 are read"):
        read_bounded(path, 4)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("link", "is a symlink"),
        ("pipe", "is not a regular file"),
        ("absent", "No such file"),
        (".", "plain"),
    ):
        with pytest.raises(SpecError, match=words):
            read_bounded(tmp_path / name, 5)


def test_the_sizes_of_several_files_count_together(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("rank0.attempt1.jsonl", "rank0.jsonl")]
    for path in paths:
        path.write_bytes(b"12345")
    check_size(paths, 10)
    with pytest.raises(
        SpecError, match=r"rank0\.attempt1\.jsonl, rank0\.jsonl: 10 bytes in total, and at most 9 are read"
    ):
        check_size(paths, 9)


def test_runs_below_a_folder_are_found_but_not_replaced_ones(tmp_path: Path) -> None:
    for name in ("quick/ring", "quick/.superseded/ring~0", "other/deep/ddp"):
        make_run(tmp_path / name, name="run", mode=name.rpartition("/")[2].strip("~0"))
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["other/deep/ddp", "quick/ring"]


def test_names_with_numbers_sort_as_numbers() -> None:
    assert sorted(["n10", "n2", "n1"], key=natural) == ["n1", "n2", "n10"]


def test_runs_are_found_in_natural_order_and_damaged_ones_as_well(tmp_path: Path) -> None:
    for name in ("n10", "n2"):
        make_run(tmp_path / name)
    (tmp_path / "n3").mkdir()
    RunFolder(tmp_path / "n3").records(0).write_text("")
    assert [path.name for path in find_runs(tmp_path)] == ["n2", "n3", "n10"]
    with pytest.raises(SpecError, match="no such folder"):
        list(find_runs(tmp_path / "none"))
