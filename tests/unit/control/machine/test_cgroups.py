"""cgroups are files: what is written into a folder that stands for the tree, in each version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.control.machine.cgroups import (
    CALLERS,
    Cgroup,
    Hierarchy,
    find_hierarchy,
    owners,
    pids_of,
)
from testbed.spec.errors import TestbedError, Unavailable


def test_version_2_is_found_by_its_controllers(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert find_hierarchy(tmp_path) == Hierarchy(tmp_path, 2)


@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct"])
def test_version_1_is_found_by_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "cgroup.procs").touch()
    assert find_hierarchy(tmp_path) == Hierarchy(tmp_path / name, 1)


def test_without_cpu_in_the_unified_tree_version_1_is_used(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cgroup.procs").touch()
    assert find_hierarchy(tmp_path).version == 1


def test_a_missing_controller_is_unavailable_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"Leave node\.cpus unset"):
        find_hierarchy(tmp_path)


def test_version_1_writes_quota_and_period(tmp_path: Path) -> None:
    group = Cgroup(Hierarchy(tmp_path, 1), "12-34/node0")
    group.create()
    group.set_quota(0.4)
    assert group.path == tmp_path / "testbed/12-34/node0"
    assert (group.path / "cpu.cfs_quota_us").read_text() == "4000"
    assert (group.path / "cpu.cfs_period_us").read_text() == "10000"
    group.set_quota(None)
    assert (group.path / "cpu.cfs_quota_us").read_text() == "-1"


def test_version_2_enables_the_controller_on_each_level_and_writes_the_maximum(tmp_path: Path) -> None:
    group = Cgroup(Hierarchy(tmp_path, 2), "12-34/node0")
    group.create()
    group.set_quota(0.4)
    for folder in (tmp_path, tmp_path / "testbed", tmp_path / "testbed/12-34"):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
    assert not (group.path / "cgroup.subtree_control").exists()
    assert (group.path / "cpu.max").read_text() == "4000 10000"
    group.set_quota(None)
    assert (group.path / "cpu.max").read_text() == "max 10000"


@pytest.mark.parametrize(
    ("version", "used", "most", "none"),
    [(1, "memory.usage_in_bytes", "memory.limit_in_bytes", "-1"), (2, "memory.current", "memory.max", "max")],
)
def test_a_memory_limit_is_the_usage_and_a_headroom_and_can_be_removed(
    tmp_path: Path, version: int, used: str, most: str, none: str
) -> None:
    group = Cgroup(Hierarchy(tmp_path, version), "12-34/node0")
    group.create("memory")
    (group.path / used).write_text("1000\n")
    group.limit_memory(64)
    assert (group.path / most).read_text() == "1064"
    group.limit_memory(None)
    assert (group.path / most).read_text() == none


def test_the_prefix_joins_the_group_and_keeps_the_pid(tmp_path: Path) -> None:
    group = Cgroup(Hierarchy(tmp_path, 1), "12-34/node0")
    group.create()
    pid = os.posix_spawnp("sh", [*group.join_argv(), "true"], os.environ)
    os.waitpid(pid, 0)
    assert pids_of(group.path) == [pid]


def test_remove_also_removes_empty_folders_above(tmp_path: Path) -> None:
    first, second = (Cgroup(Hierarchy(tmp_path, 1), f"12-34/node{k}") for k in range(2))
    for group in (first, second):
        group.path.mkdir(parents=True)
    assert list(owners(Hierarchy(tmp_path, 1))) == ["12-34"]
    first.remove()
    assert second.path.exists()
    second.remove()
    second.remove()  # a group that is gone is ignored
    assert list(tmp_path.iterdir()) == [] and owners(Hierarchy(tmp_path, 1)) == {}


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    group = Cgroup(Hierarchy(tmp_path, 2), "12-34/node0")
    with pytest.raises(TestbedError, match=r"cpu\.max failed: No such file"):
        group.set_quota(1.0)


def delegate(root: Path, monkeypatch: pytest.MonkeyPatch, *writable: Path) -> Path:
    """A hierarchy of root's in which this process is in /user/scope; return a file like /proc/self/cgroup."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) in writable)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1")
    own = root / "own"
    own.write_text("4:cpu,cpuacct:/user/scope\n1:name=systemd:/other\n0::/user/scope\n")
    return own


def test_a_user_has_the_delegated_group_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cpu" / "user/scope"
    folder.mkdir(parents=True)
    (tmp_path / "cpu/cgroup.procs").touch()
    own = delegate(tmp_path, monkeypatch, folder, folder / "cgroup.procs")
    assert find_hierarchy(tmp_path, own=own) == Hierarchy(folder, 1, delegated=True)
    with pytest.raises(Unavailable, match=r"cpu is not writable.*Delegate=yes"):
        find_hierarchy(tmp_path, own=delegate(tmp_path, monkeypatch, folder))


def test_processes_leave_a_delegated_group_of_version_2_before_a_controller_is_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user/scope"
    folder.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (folder / "cgroup.controllers").write_text("cpu\n")
    (folder / "cgroup.procs").write_text("77\n")
    own = delegate(tmp_path, monkeypatch, folder, folder / "cgroup.procs", folder / "cgroup.subtree_control")
    found = find_hierarchy(tmp_path, own=own)
    assert found == Hierarchy(folder, 2, delegated=True)
    with pytest.raises(
        Unavailable, match=r"memory limit: .* without the memory controller\. .*user@\.service\.d"
    ) as other:
        find_hierarchy(tmp_path, controller="memory", own=own)
    assert "systemd-run" not in str(other.value), "it is in such a cgroup"
    with monkeypatch.context() as patch:
        patch.setattr(os, "getxattr", lambda path, name: b"0")  # writable, but managed by systemd
        with pytest.raises(Unavailable, match=rf"not marked .*Delegate=yes.* setfattr -n user.delegate -v 1 {folder}$"):
            find_hierarchy(tmp_path, own=own)
    Cgroup(found, "12-34/node0").create()
    assert (folder / CALLERS / "cgroup.procs").read_text() == "77"
    assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
    own.write_text(f"0::/user/scope/{CALLERS}\n")  # where this process is now
    assert find_hierarchy(tmp_path, own=own) == found
