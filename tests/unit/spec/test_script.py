"""The user's own script: placeholders, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from testbed.spec.errors import SpecError, UsageError
from testbed.spec.run import RunSpec
from testbed.spec.script import Mount, ScriptSpec, check_tree, command_line, fill, node_address, walk

VALUES = {"rank": "2", "world": "4", "master": "10.77.0.10", "port": "29500", "address": "a", "interface": "eth0"}


def script(*argv: str) -> ScriptSpec:
    return ScriptSpec.load({"argv": argv, "folder": "/tmp"}, "test")


def test_placeholders_are_replaced_also_inside_a_word() -> None:
    assert fill(["main.py", "--url", "tcp://{master}:{port}", "--rank={rank}"], VALUES) == [
        "main.py",
        "--url",
        "tcp://10.77.0.10:29500",
        "--rank=2",
    ]


def test_doubled_braces_and_other_braces_stay() -> None:
    assert fill(["{{rank}}", '{"a": 1}', "{}"], VALUES) == ["{rank}", '{"a": 1}', "{}"]


def test_a_command_line_quotes_what_a_shell_would_change_and_no_placeholder() -> None:
    argv = ["python", "main.py", "--url", "tcp://{master}:{port}", "--name", "a b", "{a,b}", "{rank};ls", ""]
    line = command_line(argv)
    assert line == "python main.py --url tcp://{master}:{port} --name 'a b' '{a,b}' '{rank};ls' ''"
    assert shlex.split(line) == argv


def test_an_unknown_placeholder_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"\{ranks\}.*Known: \{rank\}, \{world\}"):
        fill(["--rank={ranks}"], VALUES)
    with pytest.raises(SpecError, match=r"\{ranks\}"):
        script("python", "main.py", "--rank={ranks}")


@pytest.mark.parametrize(
    ("argv", "name"), [(["python", "a/main.py", "--x"], "main.py"), (["torchrun", "-m", "p"], "torchrun")]
)
def test_the_name_is_that_of_the_script(argv: list[str], name: str) -> None:
    assert script(*argv).name == name


def test_the_mode_script_needs_a_script_and_other_runs_are_as_before() -> None:
    with pytest.raises(SpecError, match="testbed exec"):
        RunSpec.load({"mode": "script"}, "")
    spec = RunSpec.load(
        {"mode": "script", "nodes": 1, "batch_per_rank": 1, "script": {"argv": ["python", "a.py"], "folder": "/x"}}, ""
    )
    assert spec.world == 1 and spec.steps is None
    assert RunSpec.from_json(spec.to_json(), "test") == spec


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a", Mount(source="/a", target="/a")),
        ("/a/:/b/", Mount(source="/a", target="/b")),
        ("/a:/b:rw", Mount(source="/a", target="/b", writable=True)),
        ("/a:/b:ro", Mount(source="/a", target="/b")),
    ],
)
def test_a_mount_is_read_only_unless_rw_is_written(text: str, mount: Mount) -> None:
    assert Mount.parse(text) == mount


@pytest.mark.parametrize("text", ["", ":/b", "/a:b", "/a:/b:x", "/a:/b:ro:z", "/a:/script", "/a:/tmp/", "/a:/"])
def test_a_mount_that_is_wrong_or_covers_the_container_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"HOST\[:TARGET"):
        Mount.parse(text)


def test_addresses_follow_that_of_node_0() -> None:
    assert [node_address("10.10.1.1", node) for node in range(3)] == ["10.10.1.1", "10.10.1.2", "10.10.1.3"]
    with pytest.raises(UsageError, match=r"node 1 would have 10\.10\.1\.255, which is no address of the same subnet"):
        node_address("10.10.1.254", 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "8.8.8.8", "node0", "10.10.1"])
def test_an_address_that_no_namespace_should_have_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="must be a private IPv4 address that is no loopback"):
        ScriptSpec.load({"argv": ["python", "main.py"], "folder": "/mine", "address": address}, "")


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (("python", "-u", "-W", "ignore", "main.py", "config.py"), "main.py"),
        (("python3.11", "-I", "{attach}", "train"), "train"),
        (("python", "-m", "package"), ""),
        (("torchrun", "--nnodes", "2", "train.py", "--file", "other.py"), "train.py"),
        (("/opt/env/bin/python", "main.py"), "main.py"),
    ],
)
def test_the_program_is_found_in_the_command_line(argv: tuple[str, ...], program: str) -> None:
    assert ScriptSpec(argv=argv, folder="/mine").program == program


def test_variables_of_the_testbed_cannot_be_set() -> None:
    for name in ("RANK", "TESTBED_OWNER", "HOME", "not a name"):
        with pytest.raises(UsageError, match=r"is set by the testbed|must be letters"):
            ScriptSpec.load({"argv": ["python"], "folder": "/mine", "environment": {name: "1"}}, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {"main.py": 10, "data/a": 3000, "data/b": 3000, ".git/x": 10**6, "src/__pycache__/y": 9}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def test_what_nobody_needs_is_left_out(folder: Path) -> None:
    assert sorted(relative for _, relative in walk(folder, [])) == ["data", "data/a", "data/b", "main.py", "src"]
    assert sorted(relative for _, relative in walk(folder, ["data", "*.py"])) == ["src"]
    assert "data/a" not in [relative for _, relative in walk(folder, ["data/a"])]


def test_a_folder_that_is_too_large_is_refused_with_its_size(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"6\.0 kB in 3 files \(data 6\.0 kB.*at most 5\.0 kB.*--exclude data"):
        check_tree(folder, max_bytes=5000)
    with pytest.raises(UsageError, match="in 3 files"):
        check_tree(folder, max_files=2)
    check_tree(folder, ["data"], max_bytes=5000)
