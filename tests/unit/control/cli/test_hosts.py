"""`testbed hosts` and `fab` before any host is contacted: options, refusals, one inventory for a whole line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.cli.hosts import HostsOptions, line_options, values_on_line
from testbed.control.runs.select import choose_hosts, node_plans
from testbed.control.substrates.hosts import ssh
from testbed.spec.errors import SpecError, TestbedError, UsageError
from testbed.spec.experiment import Experiment
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec

ROOT = Path(__file__).parents[4]
TWO = '[[nodes]]\nname = "a"\naddress = "192.0.2.1"\ncpus = 2.0\n[[nodes]]\nname = "b"\naddress = "192.0.2.2"\n'
HOSTILE = [
    "a'b",
    'a"b',
    "$(touch x)",
    "`touch x`",
    "a\nb",
    "; rm -rf /",
    "ünïcode",
    "x" * 5000,
    "-oProxyCommand=x",
    "a b",
]
KEYS = ["name", "address", "user", "key", "interface", "mode"]


@pytest.fixture(autouse=True)
def no_host_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a host was contacted")

    monkeypatch.setattr(ssh.Host, "open", fail)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_INVENTORY", raising=False)
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    return path


def hosts(*argv: str) -> Any:
    """A command of `testbed hosts`; what it raises is in `exception`."""
    return CliRunner().invoke(main.app, ["hosts", *argv])


def test_an_option_is_found_anywhere_on_the_line() -> None:
    argv = ["fab", "doctor", "--inventory=b", "run", "--mode", "ring", "--inventory", "a"]
    assert sorted(values_on_line(argv, "--inventory")) == ["a", "b"] and values_on_line(argv, "--data") == []


def test_options_about_the_hosts_hold_for_the_whole_line() -> None:
    argv = ["fab", "doctor", "deploy", "run", "--inventory", "two.toml", "--accept-new", "--data", "synthetic"]
    own = {"inventory": None, "nodes": None, "accept_new": False, "data": []}
    hosts = {"inventory": "two.toml", "nodes": None, "accept_new": True}
    assert line_options(argv, "deploy", own) == hosts | {"data": ["synthetic"]}
    assert line_options(argv, "deploy", own | {"data": ["mnist"]}) == hosts, "its own data is sent"
    assert line_options(argv, "run", own) == hosts, "the data of a run is its own"
    assert line_options(argv, "status", {"inventory": None}) == {"inventory": "two.toml"}
    with pytest.raises(SpecError, match=r"--inventory .* applies to all tasks"):
        line_options([*argv, "status", "--inventory=other.toml"], "run", own)
    assert line_options(["fab", "doctor", "run", "--nodes", "1"], "doctor", own)["nodes"] == "1"
    with pytest.raises(SpecError, match=r"--nodes .* applies to all tasks"):
        line_options(["fab", "run", "--nodes", "1", "--nodes=2"], "run", own)


def test_the_inventory_is_that_of_the_option_else_of_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = HostsOptions.read(file, accept_new=True)
    assert [node.name for node in read.inventory.nodes] == ["a", "b"] and read.accept_new
    assert [node.name for node in HostsOptions.read(file, False, "1").inventory.nodes] == ["a"]
    monkeypatch.setenv("TESTBED_INVENTORY", str(file))
    assert HostsOptions.read(None, accept_new=False).inventory == read.inventory


def test_without_an_inventory_the_message_says_how_to_get_one(file: Path) -> None:
    with pytest.raises(SpecError, match=r"cp inventory/hosts\.example\.toml inventory/hosts\.toml"):
        HostsOptions.read(None, accept_new=False)


@pytest.mark.parametrize("nodes", ["3", "0", "-1", "two", "1.5", "٣"])
def test_more_hosts_than_there_are_or_not_a_number_is_refused(file: Path, nodes: str) -> None:
    with pytest.raises(SpecError, match="nodes"):
        HostsOptions.read(file, False, nodes)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_value_is_refused_with_a_sentence_and_reaches_no_host(file: Path, key: str, value: str) -> None:
    with pytest.raises(SpecError) as refusal:
        if key == "mode":
            raise hosts("run", f"--inventory={file}", f"--mode={value}", "--data=synthetic").exception
        Inventory.load({"nodes": [{"name": "a", "address": "192.0.2.1"} | {key: value}]}, "hosts.toml")
    assert key in str(refusal.value) and refusal.value.exit_code == UsageError.exit_code


CANNOT: dict[str, tuple[list[str], str]] = {
    "a rate": (["--rate", "5mbit"], r'^link \{"rate":"5mbit"\}: the network of real hosts'),
    "a rate of one": (["--set", "overrides.node1.link.rate=5mbit"], r'^link \{"rate":"5mbit"\} of node1: the network'),
    "a congestion control": (
        ["--set", "node.congestion=foo"],
        r"^--set node\.congestion='foo': real hosts use",
    ),
    "another substrate": (["--on", "compose"], "for real hosts"),
}


@pytest.mark.parametrize(("argv", "words"), CANNOT.values(), ids=CANNOT)
def test_what_real_hosts_cannot_do_is_refused_with_the_reason(file: Path, argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        raise hosts("run", "--inventory", str(file), "--data", "synthetic", *argv).exception


def test_data_that_is_not_here_is_not_sent(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(TestbedError, match="testbed data get mnist"):
        raise hosts("deploy", "--inventory", str(file), "--data", "synthetic", "--data", "mnist").exception
    with pytest.raises(TestbedError, match="is not a known data set"):
        raise hosts("deploy", "--inventory", str(file), "--data", "imagenet").exception
    result = hosts("deploy", "--inventory", str(file))
    assert "data cifar10 is missing here, so it is not sent" in result.stdout


def test_a_run_on_hosts_has_no_rate_and_the_cpu_quotas_of_the_inventory() -> None:
    inventory = Inventory.load(
        {"nodes": [{"name": "a", "address": "h1", "cpus": 2}, {"name": "b", "address": "h2", "cpus": 4}]}, ""
    )
    spec = RunSpec.load({"nodes": 2, "link": {"rate": "1gbit"}}, "")
    applied = choose_hosts(inventory, spec).drop_unsupported(spec)
    assert not applied.link.shaped and applied.node.congestion is None and applied.node.cpus is None
    assert {name: own.cpus for name, own in applied.overrides.items()} == {"node0": 2.0, "node1": 4.0}
    requested = RunSpec.load({"nodes": 2, "node": {"cpus": 0.4}}, "")
    assert choose_hosts(inventory, requested).drop_unsupported(requested).node.cpus == 0.4
    with pytest.raises(SpecError, match="the inventory has 2 hosts"):
        choose_hosts(inventory, RunSpec.load({"nodes": 4}, ""))


def test_a_cpu_quota_of_an_experiment_is_applied_on_hosts_and_a_link_is_noted_as_not_applied(tmp_path: Path) -> None:
    cells = [run for run in Experiment.read(ROOT / "experiments/straggler.toml").runs() if str(run.mode) == "ring"]
    inventory = Inventory.load({"nodes": [{"name": f"h{k}", "address": f"h{k}", "cpus": 2} for k in range(4)]}, "")
    hosts = choose_hosts(inventory, cells[0])
    shares = [[plan.cpus for plan in node_plans(hosts.drop_unsupported(cell))] for cell in cells]
    assert shares == [[0.4] * 4, [0.4, 0.4, 0.2, 0.4], [0.4] * 4]
    assert [sorted(hosts.drop_unsupported(cell).overrides) for cell in cells] == [[], ["node2"], []]
    notes = [list(hosts.make(cell, tmp_path / "run").notes) for cell in cells]
    assert notes[0] == notes[1] and '"500mbit"} not applied: the network of real hosts is measured' in notes[0][0]
    assert '{"rate":"125mbit"} of node2 not applied' in notes[2][0] and "--on compose or netns" in notes[2][0]


def test_a_congestion_control_of_an_experiment_is_noted_as_not_applied_on_hosts(tmp_path: Path) -> None:
    inventory = Inventory.load({"nodes": [{"name": f"h{k}", "address": f"h{k}"} for k in range(2)]}, "")
    for congestion, notes in (("reno", 1), ("cubic", 0), (None, 0)):
        spec = RunSpec.load({"nodes": 2, "node": {"congestion": congestion}}, "")
        found = list(choose_hosts(inventory, spec).make(spec, tmp_path / "run").notes)
        assert len(found) == notes and all(note.startswith("congestion control reno not applied: ") for note in found)


def test_a_cpu_quota_of_one_node_overrides_the_inventory() -> None:
    inventory = Inventory.load({"nodes": [{"name": f"h{k}", "address": f"h{k}", "cpus": 2} for k in range(2)]}, "")
    spec = RunSpec.load({"nodes": 2, "overrides": {"node1": {"cpus": 0.5}}}, "")
    assert [plan.cpus for plan in node_plans(choose_hosts(inventory, spec).drop_unsupported(spec))] == [2.0, 0.5]


def fab(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "fab"), "--search-root", str(ROOT), *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_fab_lists_the_commands_of_testbed_hosts(tmp_path: Path) -> None:
    done = fab("--list", cwd=tmp_path)
    tasks = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2] != " "}
    assert tasks == {"doctor", "deploy", "run", "sweep", "status", "logs", "collect", "stop", "clean"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "--steps", "$(touch x)"], "steps"),
        (["run", "--nodes", "two"], "nodes 'two'"),
        (["run", "--data", "synthetic", "--fault", "cut:rank0@step1", "--retries", "1"], "cannot be injected on hosts"),
        (["run", "--fault", "trip:rank0@step1"], "unknown kind"),
        (["run", "--retries", "many"], "retries"),
        (["run", "--rate", "1gbit"], "measured, never shaped"),
        (["run", "--data", "synthetic", "--set", "node.congestion=foo"], "node.congestion='foo'"),
        (["run", "--model", "nosuch"], "'nosuch': unknown"),
        (["run", "--data", "nosuch"], "'nosuch': is not a known data set"),
        (["run", "--mode", "rong; touch x"], "rong; touch x"),
        (["doctor", "--inventory", "other.toml", "run"], "applies to all tasks"),
        (["logs", "--lines", "many"], "lines 'many'"),
        (["collect", "--run", "../up"], "--run '../up'"),
    ],
)
def test_fab_refuses_with_one_sentence_and_no_traceback(file: Path, argv: list[str], words: str) -> None:
    done = fab(*argv, "--inventory", str(file), cwd=file.parent)
    assert done.returncode == UsageError.exit_code, done.stdout + done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in file.parent.iterdir()} == {"two.toml"}
