"""What is asked of a host: argument lists without privileges, names without surprises, lines a shell reads back."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.control.substrates.hosts.node import (
    RUN_ID,
    Account,
    Container,
    mount,
    once,
    parse_account,
    run_id,
    user,
)
from testbed.control.substrates.hosts.ssh import command_line

HOSTILE = ["; rm -rf /", "$(reboot)", "`reboot`", "a'b", 'a"b', "a\nb", "-v", "ü", "x" * 5000, "a,b", "a:b", "*", ""]


def container(**changes: object) -> Container:
    values: dict[str, object] = {
        "name": "testbed-x-0",
        "run": "x",
        "rank": 0,
        "who": "1000:1000",
        "argv": ["python3", "-m", "testbed.rank"],
        "output": Path("/runs/x/rank0.log"),
        "mounts": [mount(PurePosixPath("/home/ann/.testbed/runs/x"), Path("/runs/x"))],
        "env": {"RANK": "0"},
    }
    return Container(**(values | changes))  # type: ignore[arg-type]


def test_a_container_has_the_hosts_network_and_no_privilege() -> None:
    line = " ".join(container().start())
    for words in ("--network host", "--cap-drop ALL", "--security-opt no-new-privileges", "--read-only"):
        assert words in line
    assert "--user 1000:1000" in line
    assert not re.search(r"--privileged|--cap-add|--pid |--device", line)


def test_limits_are_those_asked_for() -> None:
    assert "--cpu-quota" not in container().start()
    limited = container(cpus=0.4).start()
    assert limited[limited.index("--cpu-quota") + 1] == "4000"


def test_every_container_carries_our_labels() -> None:
    argv = container().start()
    labels = [value for flag, value in itertools.pairwise(argv) if flag == "--label"]
    own = ["testbed.run=x", "testbed.rank=0", "testbed.purpose=rank"]
    assert labels == ["testbed=hosts", f"testbed.user={user()}", *own]
    assert "testbed=hosts" in once("1:1", "ip", "-json", "address")


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_stays_one_argument_on_its_way_through_a_shell(value: str) -> None:
    line = command_line(container(env={"KEY": value}, argv=["echo", value]).start(), 10)
    words = shlex.split(line)
    assert words[:3] == ["timeout", "--kill-after=5", "10"]
    assert f"KEY={value}" in words and words[-1] == value


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_any_argument_survives_quoting(text: str) -> None:
    assert shlex.split(command_line(["a", text], 1))[-1] == text


def test_a_mount_reads_back_whatever_the_path_holds() -> None:
    path = '/home/a, "b":c'
    _, value = mount(PurePosixPath("/there"), Path(path), read_only=True)
    assert next(csv.reader([value])) == ["type=bind", "source=/there", f"target={path}", "readonly"]


@given(st.text(max_size=200))
def test_the_name_of_a_run_is_safe_whatever_the_folder_is_called(name: str) -> None:
    try:
        folder = Path("/runs") / name
    except ValueError:
        return
    assert RUN_ID.fullmatch(run_id(folder))


def test_where_we_are_root_the_rank_is_nobody() -> None:
    assert parse_account("0\n0\n/root\n").who == "65534:65534"
    ann = parse_account("1000\n1001\n/home/ann\n")
    assert ann == Account(1000, 1001, PurePosixPath("/home/ann")) and ann.who == "1000:1001"
    assert str(ann.runs) == "/home/ann/.testbed/runs"
