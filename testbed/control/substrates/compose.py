"""One container per node, by Docker Compose: the containers of compose.yaml, for any number of nodes.

With `docker compose up` each container's entrypoint shapes its network and then becomes the rank. Here the controller
does the same from outside: containers start idle on an internal network, `docker exec` shapes them as root and starts
ranks without any privilege. The CPU quota is set after the probe, which it would slow down.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from testbed.control.machine import affinity, ownership
from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodeCounts, NodeHandle, NodePlan, Process
from testbed.control.substrates.clone import ROOT
from testbed.control.substrates.docker_cli import (
    DATA_FOLDER,
    MAX_PIDS,
    NOBODY_USER,
    OWNER_LABEL,
    PROJECT_LABEL,
    RUN_FOLDER,
    SCRIPT_FOLDER,
    SERVICE_LABEL,
    exec_argv,
    exit_code,
)
from testbed.control.substrates.engine import (
    ENGINE_TIMEOUT_S,
    answers,
    check_answers,
    connect,
    image_name,
    render,
    run_docker,
    shaping,
    used_memory_bytes,
    variable,
    wrap_docker_errors,
)
from testbed.control.substrates.links import INTERFACE, READ_COUNTERS, ShapedLinks, parse_counts
from testbed.control.substrates.process import STOP_GRACE_S, spawn
from testbed.control.substrates.racks import (
    LIST_ADDRESSES,
    LIST_COUNTERS,
    RackNetwork,
    read_uplinks,
    routes_from,
    shape_router,
)
from testbed.net.isolation import default_routes, isolate
from testbed.net.shaping import LIST_QDISCS, Shaping, routes_congestion
from testbed.spec.datasets import data_dir
from testbed.spec.errors import CommandFailed, EngineLost, NetworkInvalid, TestbedError, refuse
from testbed.spec.link import why_not_shaped
from testbed.spec.privileges import LAUNCHER, LAUNCHER_CAPABILITIES, NOBODY, without_privileges
from testbed.spec.resources import CPU_PERIOD_US, DEFAULT_LIMIT, NO_QUOTA, quota_and_period, read_limit
from testbed.spec.run import DEFAULT_PORT
from testbed.spec.script import NOT_COPIED, Limits, ScriptSpec

SIGNAL_TIMEOUT_S = 30.0


class ContainerProcess:
    """A process in a container; a `docker exec` on this machine has its output and exit code.

    It has no privilege but the capabilities `kept`.
    """

    def __init__(
        self,
        container: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        uid_gid: tuple[int, int],
        kept: Sequence[str] = (),
    ) -> None:
        self._container = container
        self._user = "{}:{}".format(*uid_gid)
        # The process writes its pid to this file: signals are sent inside, where it has another pid than here.
        self._pid_file = f"/tmp/pid-{time.monotonic_ns()}"
        wrapped = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', self._pid_file]
        wrapped += [*without_privileges(*uid_gid, kept), *argv]
        self._exec = spawn(exec_argv(container, wrapped, env=env), {}, log)
        self._verified = False  # True: the exit code is that of the process
        self.pid = self._exec.pid

    @property
    def running(self) -> bool:
        """True until its `docker exec` has ended."""
        return self._exec.poll() is None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs. Raises EngineLost."""
        code = self._exec.poll()
        if code and not self._verified:
            check_answers()  # without an engine `docker exec` ends with a code of its own, and the process runs on
            self._verified = True
        return None if code is None else exit_code(code)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise TimeoutError."""
        return exit_code(self._exec.wait(timeout))

    def signal(self, signum: int) -> None:
        """Send a signal from inside, as the process's own user: the container's root has no KILL capability."""
        if self.running:
            with contextlib.suppress(TestbedError):  # the process has ended meanwhile
                self._run_inside(f'kill -{int(signum)} "$(cat "$0")"')

    def forbid_writing(self) -> None:
        """Limit the size of its files to one byte: every further write fails, as on a full disk."""
        self._run_inside('prlimit --pid "$(cat "$0")" --fsize=1')

    def _run_inside(self, script: str) -> None:
        run_docker(exec_argv(self._container, ["sh", "-c", script, self._pid_file], user=self._user), SIGNAL_TIMEOUT_S)

    def abandon(self) -> None:
        """Kill the `docker exec` here; the process itself ends with its container."""
        self._exec.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            self._exec.wait(SIGNAL_TIMEOUT_S)


class ComposeSubstrate:
    """N containers of one Compose project on a network of their own, or on one per rack with a router between them.

    Leaving the context removes all of them.
    """

    name = "compose"
    one_clock = True
    python = "python3"  # of the image, which has our package on its path
    notes: Sequence[str] = ()

    def __init__(self, plans: Sequence[NodePlan], folder: Path, script: ScriptSpec | None = None) -> None:
        self._plans = tuple(plans)
        self._folder, self._runs = folder.resolve(), folder.resolve().parent
        self._script = script
        # A script that is not trusted runs as another user than its launcher, which writes its records and exit code.
        self._apart = script is not None and script.limits is not None
        self._uid_gid = rank_uid_gid(self._apart)
        self._source: str | Path = ""  # what a script's containers see as its folder
        self._staged: Path | None = None  # what they see as the run's folder
        self._project = f"{ownership.PREFIX}-{ownership.current()}"
        directions = shaping()
        self.shaped, self.not_shaped = directions != "off", why_not_shaped(directions)
        self._links = ShapedLinks(self._plans, self.exec, self._set_routes, ingress=directions == "both")
        self._racks = tuple(plan.rack for plan in self._plans if plan.uplink)  # of each node; empty: one network
        self._cores: list[affinity.Cores | None] = []
        self._client: Any = None  # of the Docker SDK
        # container objects of the Docker SDK; `attrs` was read once, right after the start
        self._containers: list[Any] = []
        self._router: Any = None
        self._rack_networks: dict[int, RackNetwork] = {}
        self._started: list[ContainerProcess] = []
        self._limits_cpus = True  # False: the quotas of ranks are lifted
        self._limited: set[int] = set()  # nodes that have their CPU quota
        self._pinned: set[int] = set()  # nodes that are limited to their own cores
        self._paused: set[int] = set()
        self._cleanup = ExitStack()
        self.nodes: Sequence[NodeHandle] = ()

    def __enter__(self) -> Self:
        self.notes = ownership.remove_dead_projects(ownership.find_projects())
        with ExitStack() as undo:
            self._client = connect()
            undo.callback(self._client.close)
            self._cores = affinity.assign_cores(self._plans, self._all_cores())
            self._make_containers(undo)
            if self._racks:
                self._make_uplinks()
            for node in range(len(self._plans)):
                self._links.shape(node)
            self._isolate()
            undo.callback(self.stop)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _info(self) -> dict[str, Any]:
        with wrap_docker_errors():
            return dict(self._client.info())

    def _make_containers(self, undo: ExitStack) -> None:
        self._runs.mkdir(parents=True, exist_ok=True)  # otherwise the engine creates it as root
        if self._script is None:
            check_enterable(self._runs)
        files = Path(tempfile.mkdtemp(prefix=f"{self._project}-"))
        undo.callback(shutil.rmtree, files, ignore_errors=True)
        if self._script:
            self._staged = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}.", dir=self._runs))
            undo.callback(shutil.rmtree, self._staged, ignore_errors=True)  # by then it has another name, see below
            copy = files / "script"
            root = os.geteuid() == 0
            self._source = readable_copy(self._script, copy, self._uid_gid) if root else self._script.folder
        (files / "compose.yaml").write_text(render(len(self._plans), project=self._project, racks=self._racks))
        override = idle_override(len(self._plans), self._volumes(), self._script, self._racks)
        (files / "idle.yaml").write_text(json.dumps(override, indent=1))  # JSON is YAML
        compose = ["docker", "compose", "--project-name", self._project, "--project-directory", str(ROOT)]
        compose += ["--file", str(files / "compose.yaml"), "--file", str(files / "idle.yaml")]
        undo.callback(_remove, [*compose, "down", "--timeout", "0", "--volumes"])
        run_docker([*compose, "up", "--detach", "--no-build", "--quiet-pull"], ENGINE_TIMEOUT_S)
        for node, plan in enumerate(self._plans):
            container = self._container(f"rank{node}")
            self._containers.append(container)
            (network,) = container.attrs["NetworkSettings"]["Networks"].values()
            handle = NodeHandle(name=plan.name, address=str(network["IPAddress"]), interface=INTERFACE)
            self.nodes = (*self.nodes, handle)

    def _container(self, service: str) -> Any:
        labels = [f"{PROJECT_LABEL}={self._project}", f"{SERVICE_LABEL}={service}"]
        with wrap_docker_errors():
            (container,) = self._client.containers.list(filters={"label": labels})
        return container

    def _make_uplinks(self) -> None:
        """Shape the router's interface in the network of each rack. Raises NetworkInvalid."""
        self._router = self._container("router")
        attached = self._router.attrs["NetworkSettings"]["Networks"]
        for rack in set(self._racks):
            found = attached[f"{self._project}_rack{rack}"]
            subnet = ipaddress.ip_interface(f"{found['IPAddress']}/{found['IPPrefixLen']}").network
            self._rack_networks[rack] = RackNetwork(str(subnet), str(found["IPAddress"]))
        try:
            listed = _exec(self._router, LIST_ADDRESSES)
            _exec_all(self._router, shape_router(self._plans, self._rack_networks, listed))
        except TestbedError as error:
            raise NetworkInvalid(f"the router between the racks: {error}") from None

    def _volumes(self) -> list[Any]:
        """Mount what the ranks need."""
        return self._script_volumes(self._script) if self._script else self._rank_volumes()

    def _script_volumes(self, script: ScriptSpec) -> list[Any]:
        """Mount the run's folder, and read-only the script's folder and the data sets: the script is not trusted.

        The run's folder does not exist yet. A temporary one is mounted, which `prepare_folder` renames later.
        """
        assert self._staged is not None
        data = data_dir().resolve()
        own = [
            _bind(self._staged, RUN_FOLDER),
            _bind(data if data.is_dir() else self._staged, DATA_FOLDER, read_only=True),
            _bind(self._source, SCRIPT_FOLDER, read_only=True),
        ]
        return [*own, *(_bind(each.source, each.target, read_only=not each.writable) for each in script.mounts)]

    def _rank_volumes(self) -> list[str]:
        """Mount the folders of runs and data at the paths that they have on this machine, and at /runs and /data."""
        paths = [self._runs, data_dir().resolve()]
        mounts = [f"{path}:{path}" for path in paths if path.is_dir()]
        # Both targets of compose.yaml are replaced; otherwise the engine would create ./data as root.
        return [f"{self._runs}:/runs", f"{paths[1] if paths[1].is_dir() else self._runs}:/data", *mounts]

    def _set_routes(self, node: int) -> None:
        """Add the routes to other racks; set congestion control on all, which works for every name of the kernel."""
        plan, name = self._plans[node], self._plans[node].congestion
        if self._racks:
            _exec_all(self._containers[node], routes_from(plan.rack, self._rack_networks, INTERFACE, name))
        if name is not None:
            show = ["ip", "-json", "-4", "route", "show", "scope", "link", "dev", INTERFACE]
            routes = json.loads(self.exec(node, show) or "[]")
            for command in routes_congestion(name, routes, INTERFACE):
                self.exec(node, command)

    def _isolate(self) -> None:
        """Remove gateways and the name server, which lead out of a network, also of one that is internal."""
        commands: dict[tuple[str, ...], list[list[str]]] = {}  # by networks: the same in all of their containers
        for container in (*self._containers, *filter(None, [self._router])):
            attached = container.attrs["NetworkSettings"]["Networks"].values()
            networks = tuple(each["NetworkID"] for each in attached)
            if networks not in commands:
                gateways = [gateway for network in networks for gateway in self._gateways(network)]
                commands[networks] = isolate(json.loads(_exec(container, default_routes()) or "[]"), gateways)
            _exec_all(container, commands[networks])

    def _gateways(self, network: str) -> list[str]:
        with wrap_docker_errors():
            ranges = self._client.networks.get(network).attrs["IPAM"]["Config"] or []
        return [each["Gateway"] for each in ranges if each.get("Gateway")]

    def exec(self, node: int, argv: Sequence[str], timeout_s: float = ENGINE_TIMEOUT_S) -> str:
        """Run a command to its end in the container as root; return its stdout."""
        return _exec(self._containers[node], argv, timeout_s)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process without any privilege. With `quota` the container gets its CPU quota and cores.

        Without `quota` both are removed, so that the probe after training measures as the one before it.
        """
        self._limit(node, quota and self._limits_cpus)
        self._pin(node, quota)
        if self._script:
            env = {**env, "TESTBED_SCRIPT": SCRIPT_FOLDER, "TESTBED_DATA": DATA_FOLDER}
            argv = [RUN_FOLDER if word == str(self._folder) else word for word in argv]
        if self._apart:
            env = {**env, "TESTBED_SCRIPT_USER": NOBODY_USER}
        kept = LAUNCHER_CAPABILITIES if self._apart else ()
        process = ContainerProcess(self._containers[node].id, argv, env, log, self._uid_gid, kept)
        self._started.append(process)
        return process

    def _limit(self, node: int, limited: bool) -> None:
        """Set or lift the planned CPU quota of a node, if it has one."""
        if self._plans[node].cpus is None or limited == (node in self._limited):
            return
        if limited:
            self.set_cpus(node, None)
            self._limited.add(node)
        else:
            self._update(node, cpu_period=CPU_PERIOD_US, cpu_quota=NO_QUOTA)
            self._limited.discard(node)

    def _pin(self, node: int, pinned: bool) -> None:
        """Limit a node to its cores, if it has its own, or give it all."""
        if pinned == (node in self._pinned):
            return
        cores = self._cores[node]
        if cores is not None:
            self._update(node, cpuset_cpus=_cpuset(cores if pinned else self._all_cores()))
        self._pinned ^= {node}

    def _all_cores(self) -> range:
        return range(self._info()["NCPU"])  # of the engine's machine, not of this one

    def _update(self, node: int, **limits: int | str) -> None:
        with wrap_docker_errors():
            self._containers[node].update(**limits)

    def port(self, wanted: int = 0) -> int:
        """Return `wanted` or DEFAULT_PORT, which is always free: a container shares its ports with no other."""
        return wanted or DEFAULT_PORT

    @property
    def late_quotas(self) -> bool:
        """True if a node has a quota."""
        return any(plan.cpus is not None for plan in self._plans)

    def limit_cpus(self, limited: bool) -> None:
        """Set or lift the quota of every container that has one."""
        self._limits_cpus = limited
        for node in range(len(self._plans)):
            self._limit(node, limited)

    def prepare_folder(self, folder: Path) -> None:
        """Give the run's folder to the user that the ranks run as."""
        if self._staged is not None:  # the containers have it mounted, and the mount stays valid when it is renamed
            for path in folder.iterdir():
                path.rename(self._staged / path.name)
            folder.rmdir()
            self._staged.chmod(0o755)
            self._staged.rename(folder)
            self._staged = None
        if os.geteuid() == 0:
            os.chown(folder, *self._uid_gid)

    def stop(self) -> None:
        """Resume paused containers, send SIGTERM, wait, then send SIGKILL. Without an engine only SIGKILL is sent."""
        for node in tuple(self._paused):
            with contextlib.suppress(TestbedError):
                self.resume(node)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._started if process.running]
            for process in running:
                process.signal(signum)
            for process in running:
                with contextlib.suppress(TimeoutError):
                    process.wait(STOP_GRACE_S)
        for process in self._started:
            process.abandon()
        if self._started and not answers():
            ownership.kill_processes(ownership.current())  # they outlive their engine
        self._started.clear()
        if self._script:  # it may have left processes behind that its launcher did not wait for
            for node in range(len(self._containers)):
                with contextlib.suppress(TestbedError):
                    self.kill(node)

    def kill(self, node: int) -> None:
        """Send SIGKILL to all processes of the users of rank and script in the container. The container stays."""
        kill = ["sh", "-c", "kill -9 -1; true"]
        for user in ("{}:{}".format(*self._uid_gid), *([NOBODY_USER] if self._apart else [])):
            run_docker(exec_argv(self._containers[node].id, kill, user=user), ENGINE_TIMEOUT_S)

    def pause(self, node: int) -> None:
        """Freeze the container."""
        with wrap_docker_errors():
            self._containers[node].pause()
        self._paused.add(node)

    def resume(self, node: int) -> None:
        """Unfreeze the container; ignored if it is not paused, because `stop` resumes before the fault is reverted."""
        if node in self._paused:
            with wrap_docker_errors():
                self._containers[node].unpause()
            self._paused.discard(node)

    def cut(self, node: int) -> None:
        """Set the link down. Disconnecting the container from its network would remove its address and queues."""
        self.exec(node, ["ip", "link", "set", INTERFACE, "down"])

    def reconnect(self, node: int) -> None:
        """Set the link up, and set the routes again, which the kernel has removed or made anew."""
        self.exec(node, ["ip", "link", "set", INTERFACE, "up"])
        self._set_routes(node)

    def uplinks(self) -> Mapping[int, Shaping]:
        """The uplink of each rack as it is requested, and as the kernel has it in the router."""
        if not self._racks:
            return {}
        return read_uplinks(self._plans, _exec(self._router, LIST_QDISCS), _exec(self._router, LIST_COUNTERS))

    def shaping(self, node: int) -> Shaping:
        """The node's link as it is requested now, and as the kernel has it."""
        return self._links.read(node)

    def counts(self, node: int) -> NodeCounts:
        """What the kernel counts for the container. NodeCounts() if no command can be started in it any more."""
        with contextlib.suppress(CommandFailed):
            return parse_counts(self.exec(node, READ_COUNTERS), INTERFACE)
        return NodeCounts()

    def set_rate(self, node: int, rate: int | None) -> None:
        """Change the rate both ways while packets flow; None restores the planned rate."""
        self._links.set_rate(node, rate)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Change the quota of the whole container; None restores the planned quota."""
        cpus = self._plans[node].cpus if cpus is None else cpus
        quota, period = quota_and_period(cpus)
        self._update(node, cpu_period=period, cpu_quota=quota)

    def limit_memory(self, node: int) -> None:
        """Limit the container to the memory that it uses now plus MEMORY_HEADROOM_BYTES."""
        with wrap_docker_errors():
            limit = used_memory_bytes(self._containers[node]) + MEMORY_HEADROOM_BYTES
        self._update(node, mem_limit=limit, memswap_limit=limit)

    def unlimit_memory(self, node: int) -> None:
        """Restore the first limits. An update cannot remove a limit, so "no limit" becomes the machine's memory."""
        first = self._containers[node].attrs["HostConfig"]
        most = first["Memory"] or self._info()["MemTotal"]
        self._update(node, mem_limit=most, memswap_limit=first["MemorySwap"] or most)


def _exec(container: Any, argv: Sequence[str], timeout_s: float = ENGINE_TIMEOUT_S) -> str:
    """Run a command to its end in a container as root; return its stdout."""
    return run_docker(exec_argv(container.id, argv), timeout_s)


def _exec_all(container: Any, commands: Iterable[Sequence[str]]) -> None:
    """Run all commands by one `docker exec`, until one fails."""
    _exec(container, ["sh", "-c", " && ".join(shlex.join(command) for command in commands)])


def _cpuset(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def _remove(down: Sequence[str]) -> None:
    """Remove the project. Without an engine it stays; the next run on this engine removes it by its mark."""
    with contextlib.suppress(EngineLost):
        run_docker(down, ENGINE_TIMEOUT_S)


def _bind(source: str | Path, target: str | Path, read_only: bool = False) -> dict[str, Any]:
    """A mount in Compose's long form, in which a path may contain a colon."""
    return {"type": "bind", "source": str(source), "target": str(target), "read_only": read_only}


def readable_copy(script: ScriptSpec, target: Path, uid_gid: tuple[int, int]) -> Path:
    """Copy a script's folder for the ranks' user, because root's own files may be readable by root alone."""
    shutil.copytree(script.folder, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED, *script.exclude))
    for path in (target, *target.rglob("*")):
        os.chown(path, *uid_gid, follow_symlinks=False)
    return target


def script_limits(limit_bytes: int, limits: Limits | None = None) -> dict[str, Any]:
    """What a script's container may use: half of its memory for files in /tmp, half for the shared memory of workers.

    `limits` are of a script that is not trusted. Files in /tmp may be executed: the script's working copy is there.
    """
    if limits is None:
        half = limit_bytes // 2
        return {"tmpfs": [f"/tmp:size={half},mode=1777,exec"], "shm_size": half, "pids_limit": MAX_PIDS}
    return {
        "tmpfs": [f"/tmp:size={limits.disk},mode=1777,exec"],
        "shm_size": limits.disk,
        "pids_limit": limits.processes,
        "mem_limit": limits.memory,
        "memswap_limit": limits.memory,
        "cap_add": ["KILL"],  # of the launcher; the others that it needs are in compose.yaml
    }


def idle_override(
    nodes: int, volumes: Sequence[Any], script: ScriptSpec | None = None, racks: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the override of compose.yaml: idle containers with the owner's label and without a CPU quota."""
    owned = {"labels": {OWNER_LABEL: ownership.current()}}
    # ranks are found by this variable if the engine is lost
    found_again = owned | {"environment": {ownership.VARIABLE: ownership.current()}}
    limits = script_limits(read_limit(variable("MEM_LIMIT") or DEFAULT_LIMIT), script.limits) if script else {}
    service = {
        "image": (script.image if script else "") or image_name(),  # the checked one
        "entrypoint": ["sleep", "infinity"],
        "stop_signal": "SIGKILL",  # `sleep` as process 1 ignores SIGTERM
        "healthcheck": {"disable": True},
        "cpu_quota": NO_QUOTA,
        "volumes": list(volumes),
        **found_again,
        **limits,
    }
    services = {f"rank{k}": service for k in range(nodes)}
    if not racks:
        return {"services": services, "networks": {"cluster": {"internal": True, **owned}}}
    services["router"] = {"image": image_name(), "stop_signal": "SIGKILL", **found_again}
    return {"services": services, "networks": {f"rack{rack}": owned for rack in sorted(set(racks))}}


def check_enterable(folder: Path) -> None:
    """Raise UsageError if the ranks' user may not enter the folder of runs, which is mounted into each container."""
    uid, status = rank_uid_gid()[0], folder.stat()
    if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
        rule = f"has mode {status.st_mode & 0o777:o}, and ranks in containers run as uid {uid}, which may not enter it"
        raise refuse("folder of the run", str(folder), rule, f"Use `chmod o+x {folder}`, or another --out.")


def rank_uid_gid(apart: bool = False) -> tuple[int, int]:
    """Return uid and gid of the ranks: this user's, or nobody's if this user is root.

    `apart`: they are launchers of a script that runs as nobody.
    """
    if os.geteuid():
        return os.geteuid(), os.getegid()
    return (LAUNCHER, LAUNCHER) if apart else (NOBODY, NOBODY)
