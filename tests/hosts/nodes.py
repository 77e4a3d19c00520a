"""Hosts for tests: containers with sshd and an engine of their own, a temporary key, and the real `fab`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
IMAGE = "testbed-node:test"
LABEL = "testbed.test=node"
# What an engine inside a container needs. --privileged is refused on many machines and would be too much.
CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_ADMIN",
    "SYS_NICE",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "SETFCAP",
]
UNCONFINED = ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined")
TIMEOUT_S = 60.0  # for an engine to answer


def command(*argv: str | Path, timeout: float = 300, **options: object) -> str:
    """Run a command to its end and return its output; a failure is an assertion with the output."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return str(done.stdout)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.25)


def base_image() -> str:
    """The base of the product's image, so that one base serves both."""
    found = command("docker", "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    wanted = ("debian:bookworm-slim", "testbed-base:bookworm")
    return next((name for name in wanted if name in found), wanted[0])


class Nodes:
    """`count` hosts on a network of their own; a home folder with key, configuration and known hosts for the user."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        self.folder = folder
        self.count = count
        self.tag = f"testbed-test-{os.getpid()}"
        self.home = folder / "home"
        self.key = self.home / ".ssh" / "id_ed25519"
        self.known = self.home / ".ssh" / "known_hosts"
        self.inventory = folder / "hosts.toml"
        self.addresses: list[str] = []
        self.names: list[str] = []  # of containers to remove

    def name(self, node: int) -> str:
        return f"{self.tag}-{node}"

    def up(self) -> None:
        """Build the image, start the hosts, wait for their engines, add their host keys."""
        command("docker", "build", "-q", "--build-arg", f"BASE={base_image()}", "-t", IMAGE, HERE, timeout=600)
        self.key.parent.mkdir(parents=True, mode=0o700)
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        command("docker", "network", "create", "--label", LABEL, self.tag)
        for node in range(self.count):
            self.start(node)
        for node in range(self.count):
            self.wait(node)
        self.learn(range(self.count))
        self.write_inventory(self.inventory)

    def start(self, node: int, disk: str = "", engine: bool = True) -> None:
        """Start one host; its engine's data are in a volume, or in a tmpfs of size `disk`."""
        caps = [word for cap in CAPABILITIES for word in ("--cap-add", cap)]
        options = [word for option in UNCONFINED for word in ("--security-opt", option)]
        mounts = ["--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw", "--tmpfs", "/run"]
        mounts += ["--tmpfs", f"/var/lib/docker:size={disk}"] if disk else ["--volume", "/var/lib/docker"]
        public = self.key.with_suffix(".pub").read_text().strip()
        env = ["--env", f"PUBLIC_KEY={public}", "--env", f"ENGINE={'yes' if engine else 'no'}"]
        name = ["--name", self.name(node), "--hostname", f"node{node}", "--network", self.tag, "--label", LABEL]
        self.names.append(self.name(node))
        command("docker", "run", "--detach", *name, "--cap-drop", "ALL", *caps, *options, *mounts, *env, IMAGE)
        self.addresses.append(self.address(node))

    def address(self, node: int) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return command("docker", "inspect", "--format", form, self.name(node)).strip()

    def wait(self, node: int) -> None:
        wait_for(lambda: self.ok(node, "docker", "version") and self.ok(node, "pgrep", "sshd"), f"node{node}")

    def inside(self, node: int, *argv: str, timeout: float = 120) -> str:
        """Run a command as root on the host without SSH, to inspect or to break it."""
        return command("docker", "exec", self.name(node), *argv, timeout=timeout)

    def ok(self, node: int, *argv: str) -> bool:
        done = subprocess.run(["docker", "exec", self.name(node), *argv], capture_output=True, timeout=120)
        return done.returncode == 0

    def host_key(self, node: int) -> str:
        text = self.inside(node, "cat", "/etc/ssh/ssh_host_ed25519_key.pub")
        return f"{self.addresses[node]} {' '.join(text.split()[:2])}\n"

    def learn(self, nodes: Iterable[int]) -> None:
        """Add host keys to known_hosts, as a first `ssh` does."""
        with self.known.open("a") as file:
            file.writelines(self.host_key(node) for node in nodes)

    def write_inventory(self, path: Path, nodes: Sequence[int] | None = None, **changes: str) -> Path:
        """`changes` maps e.g. "node1.user" to another TOML value."""
        lines = []
        for node in nodes if nodes is not None else range(self.count):
            values = {"name": f'"node{node}"', "address": f'"{self.addresses[node]}"', "user": '"student"'}
            values["key"] = json.dumps(str(self.key))
            values |= {k.partition(".")[2]: v for k, v in changes.items() if k.startswith(f"node{node}.")}
            lines += ["[[nodes]]", *(f"{key} = {value}" for key, value in values.items()), ""]
        path.write_text("\n".join(lines))
        return path

    def fab(self, *argv: str | Path, timeout: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `fab` to its end."""
        return subprocess.run(
            fab(*argv), cwd=self.folder, env=self.environment(**env), capture_output=True, text=True, timeout=timeout
        )

    def testbed(self, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `testbed` to its end, in `cwd` or in the folder of the hosts."""
        whole = [sys.executable, "-m", "testbed.control", *argv]
        env = self.environment()
        where = cwd or self.folder
        return subprocess.run(whole, cwd=where, env=env, capture_output=True, text=True, timeout=280)

    def start_fab(self, *argv: str | Path, **env: str) -> subprocess.Popen[str]:
        """Start `fab`, to be interrupted."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            fab(*argv), cwd=self.folder, env=self.environment(**env), stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def environment(self, **env: str) -> dict[str, str]:
        whole = {**os.environ, "HOME": str(self.home), "TESTBED_INVENTORY": str(self.inventory), "COLUMNS": "200"}
        whole |= {"TESTBED_RUNS": str(self.folder / "runs"), "TESTBED_DATA": str(self.folder / "data")}
        return {**whole, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.folder / "cache")} | env

    def leftovers(self, node: int) -> list[str]:
        """Our containers, images and files on a host."""
        containers = self.inside(node, "docker", "ps", "--all", "--quiet").split()
        images = self.inside(node, "docker", "images", "--quiet").split()
        files = self.inside(node, "find", "/home/student", "/tmp", "/var/tmp", "-newer", "/node.sh").splitlines()
        usual = re.compile(r"(/home/student(/\.ssh(/authorized_keys)?)?|/tmp|/var/tmp)")
        return [*containers, *images, *(path for path in files if not usual.fullmatch(path))]

    def of_runs(self, node: int) -> list[str]:
        """Containers and files of runs on a host."""
        files = self.inside(node, "find", "/home/student/.testbed", "-path", "*/runs*").splitlines()
        return [*self.inside(node, "docker", "ps", "--all", "--quiet").split(), *files]

    def running(self, node: int) -> list[str]:
        return self.inside(node, "docker", "ps", "--quiet").split()

    def down(self) -> None:
        """Remove everything of this instance, in any state."""
        null = subprocess.DEVNULL
        removing = [
            subprocess.Popen(["docker", "rm", "--force", "--volumes", name], stdout=null, stderr=null)
            for name in self.names
        ]
        for process in removing:
            process.wait(180)
        subprocess.run(["docker", "network", "rm", self.tag], capture_output=True, timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)


def fab(*argv: str | Path) -> list[str]:
    """The `fab` beside the interpreter that runs the tests, with our fabfile."""
    return [str(Path(sys.executable).parent / "fab"), "--search-root", str(ROOT), *map(str, argv)]
