"""`fab` with real SSH servers and real engines: deploy, run, and what may go wrong."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from testbed.spec.errors import Interrupted, RankFailed, UsageError
from tests.hosts.conftest import Cluster
from tests.hosts.nodes import ROOT, Nodes, command, wait_for
from tests.support.command import write_method

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
QUICK = ["--model", "lenet5", "--data", "synthetic", "--batch", "64", "--set", "probe=false", "--set", "evaluate=never"]


def newest(nodes: Nodes) -> Path:
    return max((nodes.folder / "runs" / "adhoc").iterdir(), key=lambda path: path.stat().st_mtime)


def records(folder: Path, rank: int, kind: str) -> list[dict[str, object]]:
    lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def hashes(folder: Path) -> set[object]:
    return {records(folder, rank, "hash")[-1]["parameters"] for rank in range(4)}


def nothing_runs(nodes: Nodes) -> bool:
    return not any(nodes.running(node) for node in range(4))


def test_doctor_deploy_run_on_one_line(cluster: Cluster) -> None:
    done, nodes = cluster.first, cluster.nodes
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("none (fab deploy)") == 4, "doctor saw hosts without an image"
    assert done.stdout.count("| node") == 8 and done.stdout.count("sent |") == 8, done.stdout
    assert "| ring |" in done.stdout and "on hosts" in done.stdout
    folder = newest(nodes)
    names = {path.name for path in folder.iterdir()}
    assert {"spec.json", "receipt.json", "summary.json", "rank3.jsonl", "rank3.log"} <= names
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["substrate"], summary["replicas_agree"]) == ("ok", "hosts", True)
    assert len(hashes(folder)) == 1
    assert all(nodes.inside(node, "docker", "ps", "--all", "--quiet") == "" for node in range(4))


def test_the_receipt_has_measured_rates_and_no_requested_ones(cluster: Cluster, nodes: Nodes) -> None:
    folders = (nodes.folder / "runs" / "adhoc").iterdir()
    receipt = json.loads(next(p for p in map(lambda f: f / "receipt.json", folders) if p.exists()).read_text())
    assert len(receipt["links"]) == 12 and all(link["requested"] is None for link in receipt["links"])
    assert all(0 < link["rtt"] < 0.5 for link in receipt["links"])
    assert len(receipt["clock"]) == 4 and receipt["clock"][0] == {"offset": 0.0, "error": 0.0}
    assert all(abs(clock["offset"]) <= clock["error"] + 0.005 for clock in receipt["clock"]), "one machine, one clock"
    assert "qdisc" not in nodes.inside(0, "tc", "qdisc", "show", "dev", "eth0").replace("qdisc noqueue", "")


def test_a_second_deploy_sends_nothing_and_ddp_runs(nodes: Nodes) -> None:
    done = nodes.fab("deploy", "run", "--mode", "ddp", "--data", "mnist", "--steps", "4", *QUICK[:2], *QUICK[4:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("there already") == 8 and "| ddp " in done.stdout
    assert len(hashes(newest(nodes))) == 1


def test_a_users_model_data_and_method_are_sent_to_the_hosts(nodes: Nodes, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_model.py", tmp_path / "mine.py")
    out = tmp_path / "r"
    flags = ["--model", "mine.py:make", "--data", "mine.py:load", "--batch", "16", "--set", "probe=false"]
    flags += ["--mode", write_method(tmp_path)]
    done = nodes.testbed(
        "run", "--on", "hosts", "--nodes", "2", "--steps", "4", *flags, "--out", str(out), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({records(out, rank, "hash")[-1]["parameters"] for rank in range(2)}) == 1
    assert sorted(path.name.split("-")[-1] for path in (out / "files").rglob("*.py")) == ["mine.py", "my_way.py"]


def test_testbed_run_on_hosts_uses_aliases_and_a_jump_host(nodes: Nodes) -> None:
    config = [
        f"Host first\n HostName {nodes.addresses[0]}",
        f"Host second\n HostName {nodes.addresses[1]}\n ProxyJump first",
    ]
    common = f"Host *\n User student\n IdentityFile {nodes.key}\n"
    (nodes.home / ".ssh" / "config").write_text("\n".join([*config, common]))
    path = nodes.folder / "aliases.toml"
    path.write_text('nodes = [{name = "a", address = "first", interface = "eth0"}, {name = "b", address = "second"}]')
    try:
        argv = ["run", "--on", "hosts", "--inventory", str(path), "--mode", "ring", "--steps", "3", *QUICK, "--json"]
        done = nodes.testbed(*argv)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["runs"][0]["spec"]["nodes"] == 2
    finally:
        (nodes.home / ".ssh" / "config").unlink()


def test_each_problem_is_one_line_with_its_fix_and_other_hosts_go_on(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(4, disk="100m")
    nodes.start(5, engine=False)
    nodes.wait(4)
    wait_for(lambda: nodes.ok(5, "pgrep", "sshd"), "sshd of node5")
    nodes.learn([4, 5])
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    kept = nodes.known.read_text()
    other_key = (tmp_path / "other.pub").read_text().split()[1]
    lines = [f"{nodes.addresses[3]} ssh-ed25519 {other_key}\n", *(nodes.host_key(k) for k in (0, 1, 2, 4, 5))]
    nodes.known.write_text("".join(lines))
    changes = {"node1.address": f'"{nodes.addresses[0].rpartition(".")[0]}.250"', "node2.key": f'"{tmp_path}/other"'}
    inventory = nodes.write_inventory(tmp_path / "bad.toml", nodes=range(6), **changes)
    try:
        for task in (["doctor"], ["deploy", "--data", "synthetic"]):
            done = nodes.fab(*task, "--inventory", inventory)
            assert done.returncode == UsageError.exit_code, done.stdout + done.stderr
            lines = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
            by_host = {line.split()[1].rstrip(":"): line for line in lines}
            assert set(by_host) == {"node1", "node2", "node3", "node4", "node5"}, done.stdout
            assert "Check that the host is up" in by_host["node1"] and "ssh-copy-id" in by_host["node2"]
            assert "has changed" in by_host["node3"] and "ssh-keygen -R" in by_host["node3"]
            assert "disk full" in by_host["node4"] and "docker system prune" in by_host["node4"]
            assert "no Docker engine" in by_host["node5"] and "apt-get install docker.io" in by_host["node5"]
        assert "there already" in next(line for line in done.stdout.splitlines() if line.startswith("| node0"))
        run = nodes.fab("run", *QUICK[:4], "--batch", "60", "--inventory", inventory)
        assert run.returncode == UsageError.exit_code and all(f"node{k}: " in run.stderr for k in (1, 2, 3)), run.stderr
        assert nothing_runs(nodes) and "Traceback" not in run.stderr
    finally:
        nodes.known.write_text(kept)


def test_an_unknown_host_key_is_refused_unless_accept_new(nodes: Nodes) -> None:
    kept = nodes.known.read_text()
    nodes.known.write_text("".join(line for line in kept.splitlines(True) if not line.startswith(nodes.addresses[1])))
    try:
        refused = nodes.fab("status")
        assert refused.returncode == UsageError.exit_code
        assert f"ssh-keyscan -p 22 {nodes.addresses[1]} >> ~/.ssh/known_hosts" in refused.stdout
        assert "--accept-new" in refused.stdout and nodes.addresses[1] not in nodes.known.read_text()
        assert nodes.fab("status", "--accept-new").returncode == 0
        assert nodes.fab("status").returncode == 0, "the key was added"
    finally:
        nodes.known.write_text(kept)


class Running:
    """`fab run` in the background; the constructor returns when its ranks train, and `end` waits for it."""

    def __init__(self, nodes: Nodes, steps: int, out: Path) -> None:
        self.folder = out
        self.fab = nodes.start_fab("run", "--mode", "ring", "--steps", str(steps), *QUICK, "--out", out)
        try:
            wait_for(self._trains, "the ranks to train", seconds=150)
        except BaseException:
            self.fab.kill()
            self.fab.communicate()
            raise

    def _trains(self) -> bool:
        assert self.fab.poll() is None, self.fab.communicate()[0]
        path = self.folder / "rank0.jsonl"
        return path.exists() and '"kind":"step"' in path.read_text()

    def end(self) -> tuple[int, str]:
        try:
            output = self.fab.communicate(timeout=120)[0]
        finally:
            self.fab.kill()
        return self.fab.returncode, output


def test_ctrl_c_stops_the_ranks_on_all_hosts(nodes: Nodes, tmp_path: Path) -> None:
    running = Running(nodes, 5000, tmp_path / "run")
    running.fab.send_signal(signal.SIGINT)
    code, output = running.end()
    assert code == Interrupted.exit_code, output
    assert json.loads((running.folder / "summary.json").read_text())["status"] == "interrupted"
    assert [nodes.of_runs(node) for node in range(4)] == [[], [], [], []], "containers and files of the run are gone"


def test_a_killed_rank_is_named_and_nothing_remains(nodes: Nodes, tmp_path: Path) -> None:
    running = Running(nodes, 5000, tmp_path / "run")
    nodes.inside(2, "docker", "kill", *nodes.running(2))
    code, output = running.end()
    assert code == RankFailed.exit_code and "rank 2 (node2) was killed by SIGKILL" in output, output
    assert [nodes.of_runs(node) for node in range(4)] == [[], [], [], []]


def test_a_killed_rank_is_restarted_and_its_records_are_complete(nodes: Nodes, tmp_path: Path) -> None:
    many = 1500  # the kill comes some hundred steps after the requested one, because records are copied first
    argv = ["--fault", "kill:rank1@step12", "--retries", "1", "--set", "checkpoint=50", "--steps", str(many)]
    done = nodes.fab("run", "--mode", "ring", *argv, *QUICK, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [[record["step"] for record in records(tmp_path / "run", rank, "step")] for rank in range(4)]
    assert (tmp_path / "run" / "rank1.attempt1.jsonl").is_file()
    assert steps == [list(range(many))] * 4
    assert len(hashes(tmp_path / "run")) == 1


def test_stop_from_another_shell_ends_the_run_with_an_error(nodes: Nodes, tmp_path: Path) -> None:
    running = Running(nodes, 5000, tmp_path / "run")
    stopped = nodes.fab("stop")
    code, output = running.end()
    assert stopped.returncode == 0 and "stopped run-" in stopped.stdout, stopped.stdout
    assert code not in (0, None) and "Traceback" not in output, output
    assert [nodes.of_runs(node) for node in range(4)] == [[], [], [], []]


def test_after_a_lost_connection_the_ranks_finish_and_collect_copies_everything(nodes: Nodes) -> None:
    running = Running(nodes, 250, nodes.folder / "runs" / "adhoc" / "cut")
    for node in range(4):
        nodes.inside(node, "pkill", "sshd")
    code, output = running.end()
    for node in range(4):
        nodes.inside(node, "/usr/sbin/sshd")
    assert code == RankFailed.exit_code and "connection lost" in output and "fab collect" in output, output
    status = nodes.fab("status")
    assert status.returncode == 0 and all(f"rank {rank} " in status.stdout for rank in range(4)), status.stdout
    logs = nodes.fab("logs", "--lines", "2").stdout
    assert all(f"rank {rank} on node{rank}" in logs for rank in range(4)) and "loss" in logs, logs
    wait_for(lambda: nothing_runs(nodes), "the ranks to finish", seconds=150)
    kept = nodes.fab("clean")
    assert kept.returncode == UsageError.exit_code and kept.stdout.count("was not collected") == 4, kept.stdout
    collected = nodes.fab("collect")
    assert collected.returncode == 0 and "| ring |" in collected.stdout, collected.stdout + collected.stderr
    assert all(len(records(running.folder, rank, "step")) == 250 for rank in range(4))
    assert len(hashes(running.folder)) == 1
    assert json.loads((running.folder / "summary.json").read_text())["status"] == "ok"
    assert "nothing to collect" in nodes.fab("collect").stdout


def test_clean_removes_everything_from_all_hosts(nodes: Nodes) -> None:
    assert nodes.leftovers(0), "image and data are there"
    done = nodes.fab("clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [nodes.leftovers(node) for node in range(4)] == [[], [], [], []]
    assert not list((nodes.folder / "cache").rglob("*.gz"))
