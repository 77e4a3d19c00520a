"""`docker` argument lists: no privileges, our labels, and values that stay one argument."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from pathlib import Path, PurePosixPath

import pytest

from testbed.control.substrates import docker_cli
from testbed.control.substrates.docker_cli import Container, docker_run_argv, local_user, mount_option
from testbed.control.substrates.hosts.ssh import command_line

HOSTILE = ["; rm -rf /", "$(reboot)", "`reboot`", "a'b", 'a"b', "a\nb", "-v", "ü", "x" * 5000, "a,b", "a:b", "*", ""]


def container(**changes: object) -> Container:
    values: dict[str, object] = {
        "name": "testbed-x-0",
        "run": "x",
        "rank": 0,
        "user": "1000:1000",
        "argv": ["python3", "-m", "testbed.rank"],
        "output": Path("/runs/x/rank0.log"),
        "mounts": [mount_option(PurePosixPath("/home/ann/.testbed/runs/x"), Path("/runs/x"))],
        "env": {"RANK": "0"},
    }
    return Container(**(values | changes))  # type: ignore[arg-type]


def test_a_container_has_the_hosts_network_and_no_privilege() -> None:
    line = " ".join(container().start_argv())
    for words in ("--network host", "--cap-drop ALL", "--security-opt no-new-privileges", "--read-only"):
        assert words in line
    assert "--user 1000:1000" in line
    assert not re.search(r"--privileged|--cap-add|--pid |--device", line)


@pytest.mark.parametrize(("cpus", "quota", "period"), [(0.4, "4000", "10000"), (0.05, "1000", "20000")])
def test_a_quota_is_set_if_it_was_requested(cpus: float, quota: str, period: str) -> None:
    assert "--cpu-quota" not in container().start_argv()
    argv = container(cpus=cpus).start_argv()
    assert (argv[argv.index("--cpu-quota") + 1], argv[argv.index("--cpu-period") + 1]) == (quota, period)


def test_every_container_on_a_host_has_our_labels() -> None:
    labels = [value for flag, value in itertools.pairwise(container().start_argv()) if flag == "--label"]
    own = ["testbed.run=x", "testbed.rank=0", "testbed.purpose=rank"]
    assert labels == ["testbed=hosts", f"testbed.user={local_user()}", *own]
    assert "testbed=hosts" in docker_run_argv("1:1", "ip", "-json", "address")


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_stays_one_argument_through_a_shell(value: str) -> None:
    line = command_line(container(env={"KEY": value}, argv=["echo", value]).start_argv(), 10)
    words = shlex.split(line)
    assert words[:3] == ["timeout", "--kill-after=5", "10"]
    assert f"KEY={value}" in words and words[-1] == value


def test_a_mount_reads_back_for_any_path() -> None:
    path = '/home/a, "b":c'
    _, value = mount_option(PurePosixPath("/there"), Path(path), read_only=True)
    assert next(csv.reader([value])) == ["type=bind", "source=/there", f"target={path}", "readonly"]


def test_filters_name_every_label() -> None:
    argv = docker_cli.list_argv("a", "b=c", running=True)
    assert [value for flag, value in itertools.pairwise(argv) if flag == "--filter"] == ["label=a", "label=b=c"]
    assert "--all" not in argv and "--all" in docker_cli.list_argv("a")


def test_the_used_memory_is_in_front_of_the_limit() -> None:
    assert docker_cli.parse_memory("12.5MiB / 2GiB\n") == int(12.5 * 2**20)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (6, 6), (128, 128), (137, -9), (143, -15)])
def test_128_and_more_is_a_death_by_signal(code: int, expected: int) -> None:
    assert docker_cli.exit_code(code) == expected


def test_a_script_has_its_own_image_and_sized_room_for_its_files() -> None:
    argv = container(image="mine:1", script=True).start_argv()
    assert [value for flag, value in itertools.pairwise(argv) if flag == "--tmpfs"][
        -1
    ] == "/tmp:size=1073741824,mode=1777,exec"
    assert argv[argv.index("--shm-size") + 1] == "1073741824" and "mine:1" in argv and docker_cli.IMAGE not in argv
    assert "--shm-size" not in container().start_argv()
