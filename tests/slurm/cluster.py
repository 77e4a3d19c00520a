"""A real Slurm on this machine: munged, slurmctld, and four slurmd, each in a network namespace on one bridge.

The namespaces share this machine's disk, as the nodes of a cluster share theirs. Every daemon runs in the foreground as
a child of this process; `down` ends them by their process ids and removes the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from testbed.spec.process_tree import descendants

ROOT = Path(__file__).parents[2]
NODES = 4
NODE_CPUS = 4  # that Slurm believes in: each rank, its probe and the holder of the allocation get one
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "nsenter", "unshare")
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # daemons are there, and not on every user's PATH
NODE_LOST_S = 10  # SlurmdTimeout: a node without an answer for so long is down
TIMEOUT_S = 60.0

CONFIGURATION = """
ClusterName=testbed
SlurmctldHost={host}({master})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,sched_min_interval=100000,bf_interval=5
SlurmdParameters=config_overrides
SlurmdTimeout={lost}
SlurmctldTimeout=60
KillWait=5
MinJobAge=120
ReturnToService=2
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=30 State=UP PriorityTier=1 OverSubscribe=FORCE:8
PartitionName=urgent Nodes=ALL MaxTime=30 State=UP PriorityTier=2
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if it can."""
    if os.geteuid() != 0:
        return "slurmd in network namespaces need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge iproute2" if absent else None


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"


def command(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its output; a failure is an assertion with the output."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, env=env or {"PATH": _path()})
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_for(condition: Callable[[], object], what: str, seconds: float = TIMEOUT_S) -> None:
    """Wait until the condition holds; an assertion after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


class Cluster:
    """Slurm's daemons, and the `testbed` command of a user on the login node, which is this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(2)
        self.net = f"10.{200 + int(self.mark, 16) % 50}.{int(self.mark, 16) // 50 % 250}"
        self.switch, self.login = f"slurm{self.mark}switch", f"slurm{self.mark}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[str]] = []

    @property
    def names(self) -> list[str]:
        return [f"n{node}" for node in range(NODES)]

    def address(self, node: int) -> str:
        return f"{self.net}.{10 + node}"

    def namespace(self, node: int) -> str:
        return f"slurm{self.mark}n{node}"

    def up(self) -> None:
        """Start everything; returns when all nodes are idle."""
        self._write_configuration()
        self._make_network()
        self._start_munged()
        self.start("slurmctld", "slurmctld", "-D", "-i")
        for node in range(NODES):
            self.start_node(node)
        self.wait_until_idle()

    def _write_configuration(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        nodes = [
            f"NodeName={name} NodeAddr={self.address(node)} CPUs={NODE_CPUS} RealMemory=100000 State=UNKNOWN"
            for node, name in enumerate(self.names)
        ]
        ports = 20_000 + int(self.mark, 16) % 10_000
        text = CONFIGURATION.format(
            host=os.uname().nodename,
            master=f"{self.net}.1",
            folder=self.folder,
            port=ports,
            node_port=ports + 1,
            lost=NODE_LOST_S,
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")

    def _make_network(self) -> None:
        """The bridge has a namespace of its own: a Docker engine's rules drop bridged traffic in the machine's own."""
        command("ip", "netns", "add", self.switch)
        command("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "br0", "up")
        self._plug("login", ["name", self.login])
        command("ip", "address", "add", f"{self.net}.1/24", "dev", self.login)
        command("ip", "link", "set", self.login, "up")
        for node in range(NODES):
            name = self.namespace(node)
            command("ip", "netns", "add", name)
            self._plug(f"port{node}", ["name", "eth0", "netns", name])
            command("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")

    def _plug(self, port: str, end: list[str]) -> None:
        """Make a link from the bridge to the other end."""
        command("ip", "link", "add", *end, "type", "veth", "peer", "name", port, "netns", self.switch)
        command("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munged.pid"}
        files |= {"seed-file": self.folder / "munge.seed", "log-file": self.folder / "munged.log"}
        self.start("munged", "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        wait_for((self.folder / "munge.socket").exists, "munged")

    def start(self, name: str, *argv: str | Path) -> None:
        """Start a daemon in the foreground, in a session of its own."""
        with (self.folder / f"{name}.out").open("ab") as out:
            null = subprocess.DEVNULL
            self.daemons[name] = subprocess.Popen(
                argv, stdin=null, stdout=out, stderr=out, env=self.environment(), start_new_session=True
            )

    def start_node(self, node: int) -> None:
        """Start a slurmd in its namespaces. `ip netns exec` would hide /sys/fs/cgroup, and slurmd refuses that."""
        name = self.names[node]
        inside = f"hostname {name}; exec slurmd -D -N {name} -f {self.folder}/slurm.conf"
        entered = ["nsenter", f"--net=/run/netns/{self.namespace(node)}", "unshare", "--uts", "sh", "-c", inside]
        self.start(name, *entered)

    def kill_node(self, node: int) -> None:
        """End a slurmd and all that it has started, as a crash of the node does."""
        daemon = self.daemons.pop(self.names[node])
        for pid in [daemon.pid, *self._of_namespace(node)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        daemon.wait(TIMEOUT_S)

    def _of_namespace(self, node: int) -> list[int]:
        """slurmstepd leaves slurmd's session and process tree, but not its network namespace."""
        return [int(pid) for pid in command("ip", "netns", "pids", self.namespace(node)).split()]

    def wait_until_idle(self) -> None:
        """Wait until every node can take a job."""
        wanted = [f"{name} idle" for name in self.names]
        wait_for(
            lambda: sorted(self.ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T").splitlines()) == wanted, "nodes"
        )

    def ask(self, *argv: str) -> str:
        """The output of a Slurm command, whatever its exit code."""
        return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, env=self.environment()).stdout

    def jobs(self) -> list[str]:
        """The ids of all jobs that have not ended."""
        return self.ask("squeue", "-h", "-o", "%i").split()

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        own = {"PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        return kept | own | {"COLUMNS": "200"} | more

    def testbed(self, *argv: str, cwd: Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `testbed` to its end."""
        whole = [sys.executable, "-m", "testbed.control", *argv]
        environment = self.environment(**env)
        return subprocess.run(whole, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)

    def start_testbed(self, *argv: str, cwd: Path) -> subprocess.Popen[str]:
        """Start `testbed`, to be disturbed."""
        whole = [sys.executable, "-m", "testbed.control", *argv]
        out = subprocess.PIPE
        started = subprocess.Popen(
            whole, cwd=cwd, env=self.environment(), stdout=out, stderr=out, text=True, start_new_session=True
        )
        self.started.append(started)
        return started

    def down(self) -> None:
        """Remove everything of this instance, in any state."""
        for started in self.started:
            started.kill()
            with contextlib.suppress(ValueError):  # its output was read
                started.communicate()
        for name in ("slurmctld", *self.names, "munged"):
            daemon = self.daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                for pid in [*descendants(daemon.pid), daemon.pid]:
                    os.kill(pid, signal.SIGKILL)
                daemon.wait(10)
        for node in range(NODES):
            if Path(f"/run/netns/{self.namespace(node)}").exists():
                for pid in self._of_namespace(node):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                command("ip", "netns", "delete", self.namespace(node))
        if Path(f"/run/netns/{self.switch}").exists():
            command("ip", "netns", "delete", self.switch)  # all links end with it


if __name__ == "__main__":  # a cluster to try things by hand: python -m tests.slurm.cluster FOLDER, until Ctrl-C
    cluster = Cluster(Path(sys.argv[1]).resolve())
    try:
        cluster.up()
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.down()
