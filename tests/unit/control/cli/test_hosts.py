"""`fab` before any host is contacted: one inventory per line, text until the spec, refusals with a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.control.cli import hosts as hosts_commands
from testbed.control.cli.hosts import Asked, on_line
from testbed.control.runs.select import on_hosts, plans
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
def nobody_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_flag_is_found_wherever_it_stands() -> None:
    argv = ["fab", "--inventory", "a", "doctor", "--inventory=b", "run", "--mode", "ring"]
    assert sorted(on_line(argv, "--inventory")) == ["a", "b"] and on_line(argv, "--data") == []


def test_one_inventory_holds_for_the_whole_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["fab", "doctor", "deploy", "run", "--inventory", str(file), "--accept-new"]
    asked = Asked.of(argv, None, False, None)
    assert [node.name for node in asked.inventory.nodes] == ["a", "b"] and asked.accept_new
    with pytest.raises(SpecError, match="one inventory holds for the whole command line"):
        Asked.of([*argv, "status", "--inventory=other.toml"], None, False, None)
    monkeypatch.setenv("TESTBED_INVENTORY", str(file))
    assert Asked.of(["fab", "doctor"], None, False, None).inventory == asked.inventory


def test_without_an_inventory_the_way_to_one_is_told(file: Path) -> None:
    with pytest.raises(SpecError, match=r"cp inventory/hosts\.example\.toml inventory/hosts\.toml"):
        Asked.of(["fab", "doctor"], None, False, None)


def test_one_number_of_nodes_holds_for_the_whole_line(file: Path) -> None:
    argv = ["fab", "doctor", "deploy", "run", "--nodes", "1"]
    assert [node.name for node in Asked.of(argv, str(file), False, None).inventory.nodes] == ["a"]
    with pytest.raises(SpecError, match="one nodes holds for the whole command line"):
        Asked.of([*argv, "--nodes=2"], str(file), False, None)


@pytest.mark.parametrize("nodes", ["3", "0", "-1", "two", "1.5", "٣"])
def test_more_hosts_than_there_are_or_no_number_is_refused(file: Path, nodes: str) -> None:
    with pytest.raises(SpecError, match="nodes"):
        Asked.of(["fab"], str(file), False, nodes)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_value_is_refused_with_a_sentence_and_reaches_nobody(file: Path, key: str, value: str) -> None:
    with pytest.raises(SpecError) as refusal:
        if key == "mode":
            asked = Asked.of(["fab"], str(file), False, None)
            flags = {"mode": value, "on": None, "link.rate": None, "data.name": "synthetic"}
            hosts_commands.run(asked, flags, [], None, False)
        else:
            Inventory.load({"nodes": [{"name": "a", "address": "192.0.2.1"} | {key: value}]}, "hosts.toml")
    assert key in str(refusal.value) and refusal.value.exit_code == 2


CANNOT: dict[str, tuple[dict[str, str], list[str], str]] = {
    "a rate": ({"link.rate": "5mbit"}, [], r'^link \{"rate":"5mbit"\}: the network of real hosts'),
    "a rate of one": ({}, ["overrides.node1.link.rate=5mbit"], r'^link \{"rate":"5mbit"\} of node1: the network'),
    "another place": ({"on": "compose"}, [], "for real hosts"),
}


@pytest.mark.parametrize(("flags", "settings", "words"), CANNOT.values(), ids=CANNOT)
def test_what_real_hosts_cannot_do_is_refused_with_the_reason(
    file: Path, flags: dict[str, str], settings: list[str], words: str
) -> None:
    asked = Asked.of(["fab"], str(file), False, None)
    plain = {"mode": "ring", "on": None, "link.rate": None, "data.name": "synthetic"}
    with pytest.raises(UsageError, match=words):
        hosts_commands.run(asked, plain | flags, settings, None, False)


def test_data_to_send_is_the_tasks_else_the_lines(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "nowhere"))
    asked = Asked.of(["fab", "deploy", "run", "--data", "synthetic"], str(file), False, None)
    assert hosts_commands._data_of(asked, None) == ["synthetic"]
    assert hosts_commands._data_of(asked, "mnist") == ["mnist"]
    assert hosts_commands._data_of(Asked.of(["fab", "deploy"], str(file), False, None), None) == []
    with pytest.raises(TestbedError, match="testbed data get mnist"):
        hosts_commands.deploy(asked, "mnist")
    with pytest.raises(TestbedError, match="no data set known"):
        hosts_commands.deploy(asked, "imagenet")


def test_a_run_on_hosts_has_no_rate_and_the_inventorys_shares() -> None:
    inventory = Inventory.load(
        {"nodes": [{"name": "a", "address": "h1", "cpus": 2}, {"name": "b", "address": "h2", "cpus": 4}]}, ""
    )
    spec = RunSpec.load({"nodes": 2, "link": {"rate": "1gbit"}}, "")
    fitted = on_hosts(inventory, spec).fit(spec)
    assert not fitted.link.shaped and fitted.node.congestion is None and fitted.node.cpus is None
    assert {name: own.cpus for name, own in fitted.overrides.items()} == {"node0": 2.0, "node1": 4.0}
    asked = RunSpec.load({"nodes": 2, "node": {"cpus": 0.4}}, "")
    assert on_hosts(inventory, asked).fit(asked).node.cpus == 0.4
    with pytest.raises(SpecError, match="the inventory has 2 hosts"):
        on_hosts(inventory, RunSpec.load({"nodes": 4}, ""))


def test_the_slow_node_of_an_experiment_is_slow_on_hosts_too_and_a_link_that_is_not_is_noted(tmp_path: Path) -> None:
    cells = [run for run in Experiment.read(ROOT / "experiments/straggler.toml").runs() if str(run.mode) == "ring"]
    inventory = Inventory.load({"nodes": [{"name": f"h{k}", "address": f"h{k}", "cpus": 2} for k in range(4)]}, "")
    hosts = on_hosts(inventory, cells[0])
    shares = [[plan.cpus for plan in plans(hosts.fit(cell))] for cell in cells]
    assert shares == [[0.4] * 4, [0.4, 0.4, 0.2, 0.4], [0.4] * 4]
    assert [sorted(hosts.fit(cell).overrides) for cell in cells] == [[], ["node2"], []]
    notes = [list(hosts.make(cell, tmp_path / "run").notes) for cell in cells]
    assert notes[0] == notes[1] and '"500mbit"} not applied: the network of real hosts is measured' in notes[0][0]
    assert '{"rate":"125mbit"} of node2 not applied' in notes[2][0] and "--on compose or netns" in notes[2][0]


def test_a_share_of_one_node_goes_over_the_inventorys() -> None:
    inventory = Inventory.load({"nodes": [{"name": f"h{k}", "address": f"h{k}", "cpus": 2} for k in range(2)]}, "")
    spec = RunSpec.load({"nodes": 2, "overrides": {"node1": {"cpus": 0.5}}}, "")
    assert [plan.cpus for plan in plans(on_hosts(inventory, spec).fit(spec))] == [2.0, 0.5]


def fab(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "fab"), "--search-root", str(ROOT), *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_fab_lists_itself(tmp_path: Path) -> None:
    done = fab("--list", cwd=tmp_path)
    tasks = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2] != " "}
    assert tasks == {"doctor", "deploy", "run", "sweep", "status", "logs", "collect", "stop", "clean"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "--steps", "$(touch x)"], "steps"),
        (["run", "--nodes", "two"], "nodes 'two'"),
        (["run", "--data", "synthetic", "--fault", "cut:rank0@step1", "--retries", "1"], "cannot be done on hosts"),
        (["run", "--fault", "trip:rank0@step1"], "unknown kind"),
        (["run", "--retries", "many"], "retries"),
        (["run", "--rate", "1gbit"], "measured, never shaped"),
        (["run", "--mode", "rong; touch x"], "rong; touch x"),
        (["doctor", "run", "--inventory", "other.toml"], "one inventory"),
        (["logs", "--lines", "many"], "lines 'many'"),
        (["collect", "--run", "../up"], "--run '../up'"),
    ],
)
def test_fab_refuses_with_one_sentence_and_no_traceback(file: Path, argv: list[str], words: str) -> None:
    done = fab("--inventory", str(file), *argv, cwd=file.parent)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in file.parent.iterdir()} == {"two.toml"}
