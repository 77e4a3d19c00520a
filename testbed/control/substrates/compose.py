"""One container per node, by Docker Compose: the very containers of compose.yaml, for any number of nodes.

`docker compose up` lets each container's entrypoint shape its network and become the rank. Here the controller does
the same from outside: containers start idle, are shaped by exec, and ranks are exec'd without any privilege. The CPU
quota comes with the first rank, so that the probe before it measures the network and not the quota.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from testbed.control.machine import affinity, leftovers, ownership
from testbed.control.substrates.base import MEMORY_LEFT, NODE_PORT, NodeHandle, NodePlan, Process
from testbed.control.substrates.content import ROOT
from testbed.control.substrates.engine import (
    CPU_PERIOD,
    IMAGE,
    OWNER_LABEL,
    PROJECT_LABEL,
    TIMEOUT,
    check,
    connect,
    in_words,
    render,
)
from testbed.control.substrates.process import GRACE, SharedFiles, run, spawn
from testbed.net.shaping import reshape, route_congestion, shape
from testbed.spec.datasets import data_dir
from testbed.spec.errors import NetworkInvalid, TestbedError
from testbed.spec.mode import methods_dir
from testbed.spec.privileges import NOBODY, without_privileges

# A process in a container, with the calls of any other process: `docker exec` stands for it on this side.

EXEC_TIMEOUT = 30.0  # seconds to deliver a signal


class ContainerProcess:
    """Runs as user `who` without any privilege; `docker exec` copies its output and takes over its exit code."""

    def __init__(
        self, container: str, argv: Sequence[str], env: Mapping[str, str], log: Path, who: tuple[int, int]
    ) -> None:
        self._container = container
        self._user = f"{who[0]}:{who[1]}"
        self._mark = f"/tmp/pid-{time.monotonic_ns()}"  # the process writes its own number there: ours differs
        variables = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        wrapped = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', self._mark, *without_privileges(*who), *argv]
        self._exec = spawn(["docker", "exec", "--user", "0", *variables, container, *wrapped], {}, log)
        self.pid = self._exec.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal as subprocess has it; None while it runs."""
        return _as_subprocess(self._exec.poll())

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        code = _as_subprocess(self._exec.wait(timeout))
        assert code is not None
        return code

    def signal(self, signum: int) -> None:
        """Send a signal from inside, as the process's own user: the container's root lacks the right to."""
        if self._exec.poll() is None:
            kill = ["sh", "-c", f'kill -{int(signum)} "$(cat "$0")"', self._mark]
            with contextlib.suppress(TestbedError):  # it has ended meanwhile
                run(["docker", "exec", "--user", self._user, self._container, *kill], EXEC_TIMEOUT)

    def forbid_writing(self) -> None:
        """No file of it may grow beyond one byte."""
        limit = ["sh", "-c", 'prlimit --pid "$(cat "$0")" --fsize=1', self._mark]
        run(["docker", "exec", "--user", self._user, self._container, *limit], EXEC_TIMEOUT)

    def abandon(self) -> None:
        """The container is gone, or will be: nothing is left to wait for."""
        self._exec.signal(9)
        with contextlib.suppress(TimeoutError):
            self._exec.wait(EXEC_TIMEOUT)


def _as_subprocess(code: int | None) -> int | None:
    """A shell's 128 + n, which `docker exec` passes on, is a death by signal n."""
    return code if code is None or code <= 128 else 128 - code


INTERFACE = "eth0"


class ComposeSubstrate(SharedFiles):
    """N labelled containers of one Compose project on a network of their own; whatever happens, they are removed."""

    name = "compose"
    shaped = True
    one_clock = True
    python = "python3"  # of the image, which has our package on its path
    notes: Sequence[str] = ()

    def __init__(self, plans: Sequence[NodePlan], folder: Path) -> None:
        self._plans = tuple(plans)
        self._runs = folder.resolve().parent
        self._project = f"testbed-{ownership.current()}"
        self._cleanup = ExitStack()
        self._started: list[ContainerProcess] = []
        self._limited: set[int] = set()
        self._paused: set[int] = set()
        self._gateways: dict[int, str] = {}  # of nodes that are cut off
        self._rates = {node: plan.link.rate for node, plan in enumerate(plans)}  # now
        self._containers: list[Any] = []
        self.nodes: Sequence[NodeHandle] = ()

    def __enter__(self) -> Self:
        check(self._plans)
        self.notes = leftovers.clear_engine()
        with ExitStack() as undo:
            self._client = connect()
            undo.callback(self._client.close)
            self._cores = affinity.share_out(self._plans, range(self._client.info()["NCPU"]))  # the engine's, not ours
            self._make_containers(undo)
            for node, plan in enumerate(self._plans):
                self._shape(node, plan)
            undo.callback(self.stop)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _make_containers(self, undo: ExitStack) -> None:
        self._runs.mkdir(parents=True, exist_ok=True)  # or the engine would make it, as root
        files = Path(tempfile.mkdtemp(prefix=f"{self._project}-"))
        undo.callback(shutil.rmtree, files, ignore_errors=True)
        (files / "compose.yaml").write_text(render(len(self._plans)))
        (files / "idle.yaml").write_text(json.dumps(idle(len(self._plans), self._volumes()), indent=1))  # JSON is YAML
        compose = ["docker", "compose", "--project-name", self._project, "--project-directory", str(ROOT)]
        compose += ["--file", str(files / "compose.yaml"), "--file", str(files / "idle.yaml")]
        undo.callback(run, [*compose, "down", "--timeout", "0", "--volumes"], TIMEOUT)
        run([*compose, "up", "--detach", "--no-build", "--quiet-pull"], TIMEOUT)
        self._containers = [self._find(node) for node in range(len(self._plans))]
        self.nodes = tuple(
            NodeHandle(name=plan.name, address=_address(container), interface=INTERFACE)
            for plan, container in zip(self._plans, self._containers, strict=True)
        )

    def _find(self, node: int) -> Any:
        labels = [f"{PROJECT_LABEL}={self._project}", f"com.docker.compose.service=rank{node}"]
        (container,) = self._client.containers.list(filters={"label": labels})
        return container

    def _volumes(self) -> list[str]:
        """Runs, data and methods under the paths they have here, so that a path means the same inside."""
        same = [self._runs, data_dir().resolve(), methods_dir().resolve()]
        mounts = [f"{path}:{path}" for path in same if path.is_dir()]
        # Both targets of compose.yaml are taken over, or the engine would make ./data for its mount, as root.
        return [f"{self._runs}:/runs", f"{same[1] if same[1].is_dir() else self._runs}:/data", *mounts]

    def _shape(self, node: int, plan: NodePlan) -> None:
        try:
            for command in shape(plan.link, INTERFACE):
                self.exec(node, command, TIMEOUT)
            self._set_congestion(node, plan.congestion)
        except TestbedError as error:
            raise NetworkInvalid(f"{plan.name}: {error}") from None

    def _set_congestion(self, node: int, name: str | None) -> None:
        """Through the route, for whatever network the container is in."""
        for route in self._routes(node, "scope", "link") if name else []:
            self.exec(node, route_congestion(name or "", route["dst"], INTERFACE, route.get("prefsrc")), TIMEOUT)

    def _routes(self, node: int, *which: str) -> list[dict[str, Any]]:
        found = self.exec(node, ["ip", "-json", "-4", "route", "show", *which, "dev", INTERFACE], TIMEOUT)
        return list(json.loads(found or "[]"))

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end in the container, as its root: that is how its network is shaped."""
        return run(["docker", "exec", "--user", "0", self._containers[node].id, *argv], timeout)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process without any privilege; the first under quota puts the container under it."""
        if quota and node not in self._limited:
            self._limit(node)
            self._limited.add(node)
        process = ContainerProcess(self._containers[node].id, argv, env, log, _who())
        self._started.append(process)
        return process

    def _limit(self, node: int) -> None:
        if self._plans[node].cpus is not None:
            self.set_cpus(node, None)
        own = self._cores[node]
        if own is not None:
            with in_words():
                self._containers[node].update(cpuset_cpus=",".join(map(str, sorted(own))))

    def port(self, wanted: int = 0) -> int:
        """A container has its ports to itself."""
        return wanted or NODE_PORT

    def share(self, folder: Path) -> None:
        """Give the run's folder to whom the ranks are."""
        if os.geteuid() == 0:
            os.chown(folder, *_who())

    def stop(self) -> None:
        """SIGTERM, some seconds to write things down, then SIGKILL; a frozen container could not react."""
        for node in tuple(self._paused):
            with contextlib.suppress(TestbedError):
                self.resume(node)
        for signum, grace in ((15, GRACE), (9, GRACE)):
            running = [process for process in self._started if process.poll() is None]
            for process in running:
                process.signal(signum)
            for process in running:
                with contextlib.suppress(TimeoutError):
                    process.wait(grace)
        for process in self._started:
            process.abandon()
        self._started.clear()

    def kill(self, node: int) -> None:
        """SIGKILL all that was started in the container, as its own user; the idle container stays, as a host would."""
        uid, gid = _who()
        everything = ["docker", "exec", "--user", f"{uid}:{gid}", self._containers[node].id]
        run([*everything, "sh", "-c", "kill -9 -1; true"], TIMEOUT)

    def pause(self, node: int) -> None:
        """Freeze the container."""
        with in_words():
            self._containers[node].pause()
        self._paused.add(node)

    def resume(self, node: int) -> None:
        """Let it go on; one that does already is fine: `stop` thaws, and then what lasts is mended."""
        if node not in self._paused:
            return
        with in_words():
            self._containers[node].unpause()
        self._paused.discard(node)

    def cut(self, node: int) -> None:
        """Link down; disconnecting it from the network would throw its address and queues away."""
        ways = [route["gateway"] for route in self._routes(node, "default") if "gateway" in route]
        if ways:
            self._gateways[node] = ways[0]
        self.exec(node, ["ip", "link", "set", INTERFACE, "down"], TIMEOUT)

    def join(self, node: int) -> None:
        """Link up again, with what the kernel forgot: congestion control stands in a route, and so does the way out."""
        self.exec(node, ["ip", "link", "set", INTERFACE, "up"], TIMEOUT)
        self._set_congestion(node, self._plans[node].congestion)
        if node in self._gateways:
            way = self._gateways.pop(node)
            self.exec(node, ["ip", "route", "replace", "default", "via", way, "dev", INTERFACE], TIMEOUT)

    def set_rate(self, node: int, rate: int | None) -> None:
        """Another rate, each way, while packets flow."""
        link = self._plans[node].link
        rate = link.rate if rate is None else rate
        for command in reshape(link, self._rates[node], rate, INTERFACE):
            self.exec(node, command, TIMEOUT)
        self._rates[node] = rate

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Another share for the whole container."""
        cpus = self._plans[node].cpus if cpus is None else cpus
        quota = -1 if cpus is None else max(1000, round(cpus * CPU_PERIOD))
        with in_words():
            self._containers[node].update(cpu_period=CPU_PERIOD, cpu_quota=quota)

    def limit_memory(self, node: int) -> None:
        """A little more than the container uses now."""
        with in_words():
            used = self._containers[node].stats(stream=False)["memory_stats"]["usage"]
            limit = used + MEMORY_LEFT
            self._containers[node].update(mem_limit=limit, memswap_limit=limit)

    def unlimit_memory(self, node: int) -> None:
        """What compose.yaml gave it; all that the engine has where that is nothing, which no update can say."""
        given = self._containers[node].attrs["HostConfig"]  # as it was when it was made
        with in_words():
            most = given["Memory"] or self._client.info()["MemTotal"]
            self._containers[node].update(mem_limit=most, memswap_limit=given["MemorySwap"] or most)


def idle(nodes: int, volumes: Sequence[str]) -> dict[str, Any]:
    """What differs from compose.yaml where a controller drives the containers: they wait, labelled, without a quota."""
    service = {
        "image": IMAGE,  # the one that was checked, whatever the environment says
        "entrypoint": ["sleep", "infinity"],
        "stop_signal": "SIGKILL",  # process 1 ignores the polite one
        "healthcheck": {"disable": True},
        "cpu_quota": -1,
        "volumes": list(volumes),
        "labels": {OWNER_LABEL: ownership.current()},
    }
    return {
        "services": {f"rank{k}": service for k in range(nodes)},
        "networks": {"cluster": {"labels": {OWNER_LABEL: ownership.current()}}},
    }


def _who() -> tuple[int, int]:
    """uid and gid of the ranks: the user's, and nobody's where that is root."""
    return (os.geteuid(), os.getegid()) if os.geteuid() else (NOBODY, NOBODY)


def _address(container: Any) -> str:
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])
