"""One network namespace per node, a bridge in another, links shaped both ways.

    node0 [eth0 10.77.0.10] --veth-- [port0]
    node1 [eth0 10.77.0.11] --veth-- [port1]  bridge br0 in the switch namespace
    ...

With racks there is a bridge per rack, and a shaped trunk from each to br0 (racks.py). The bridge has its own namespace
because a Docker engine's FORWARD policy drops bridged traffic in the machine's own.
Every veth pair is created inside the namespaces: none is visible outside, and all disappear with the namespaces.

Root makes them on the machine, another user in a user namespace (machine/user_namespace.py). A user without a cgroup
gets no CPU quota: nodes share the cores, to which their ranks are pinned if the cores can be divided equally among them
(`divide_cores` in spec/resources.py; 3 nodes on 2 cores are left to the kernel). So that a single node does not have a
core of its own then, every idle node runs a copy of its job at the same time (copies.py).
"""

from __future__ import annotations

import ipaddress
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from testbed.control.machine import affinity, ownership, user_namespace
from testbed.control.machine.cgroups import Cgroup, find_hierarchy, has_controller
from testbed.control.machine.processes import kill_until_gone, pids_in_namespace, run, send
from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodeCounts, NodeHandle, NodePlan, Process
from testbed.control.substrates.copies import Copies, WithCopies
from testbed.control.substrates.links import INTERFACE, READ_COUNTERS, ShapedLinks, parse_counts, trials, try_commands
from testbed.control.substrates.process import LocalProcess, dies_with_parent, spawn, stop
from testbed.control.substrates.racks import LIST_COUNTERS, bridge_of, make_bridges, read_uplinks
from testbed.net.shaping import LIST_QDISCS, Shaping, congestion, route_congestion
from testbed.spec.errors import TestbedError, Unavailable, require_extra
from testbed.spec.resources import quota_and_period
from testbed.spec.run import DEFAULT_PORT

TOOLS = {"ip": "iproute2", "tc": "iproute2", "sysctl": "procps", "unshare": "util-linux", "nsenter": "util-linux"}
ONLY_WITHOUT_ROOT = ("nsenter",)
SUBNET = "10.77.0.0/24"
FIRST_HOST = 10  # node k has 10.77.0.(10 + k)
MAX_NODES = 240
COMMAND_TIMEOUT_S = 20.0  # each of these commands takes milliseconds
# Without IPv6 no neighbour discovery is in the byte counters. -e ignores a kernel without IPv6.
NO_IPV6 = ["sysctl", "-q", "-e", "-w", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]


def check(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable for what this machine cannot do, before anything that stays is created."""
    require_extra("substrate netns", "rank", "torch", "torchvision")
    check_network(plans)


def check_network(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable for namespaces, links and CPU shares that this machine cannot make."""
    check_count(len(plans))
    check_namespaces()
    shares = {plan.cpus for plan in plans}
    for cpus in shares - {None}:
        quota_and_period(cpus)
    # Without root nodes with equal shares run without a quota (`without_quota`), so no cgroup is needed.
    if shares != {None} and (len(shares) > 1 or not user_namespace.needed()):
        find_hierarchy()
    up = ["ip", "link", "set", "lo", "up"]
    needed = [
        ([up], "network namespaces"),
        ([["ip", "link", "add", "br0", "type", "bridge"]], "bridges (bridge)"),
        ([["ip", "link", "add", "port0", "type", "veth", "peer", "name", "eth0"]], "virtual links (veth)"),
    ]
    for name in sorted({plan.congestion for plan in plans if plan.congestion}):
        needed.append(([up, route_congestion(name, SUBNET, "lo")], f"congestion control {name} (tcp_{name})"))
    for commands, feature in [*needed, *trials(plans)]:
        try_commands("substrate netns: this machine's kernel", commands, feature, _run_in_temporary_namespace)


def check_namespaces() -> None:
    """Raise Unavailable if a command is missing, or this user may not make network namespaces."""
    for tool, path in tools().items():
        if path is None:
            raise Unavailable(f"substrate netns: the command {tool} is missing. Install {TOOLS[tool]}")
    user_namespace.check()


def tools() -> dict[str, str | None]:
    """The commands that are needed here, and where they are; None: missing."""
    names = [tool for tool in TOOLS if user_namespace.needed() or tool not in ONLY_WITHOUT_ROOT]
    return {name: shutil.which(name, path=user_namespace.search_path()) for name in names}


def without_quota() -> bool:
    """Return True if nodes get no CPU quota: root's always do, another user's need a cgroup of that user."""
    return user_namespace.needed() and not has_controller("cpu")


def where() -> str:
    """Words on how an ordinary user makes namespaces, and whether nodes get a CPU quota."""
    quota = ", without a CPU quota" if without_quota() else ""
    return f"in a user namespace, without root{quota}" if user_namespace.needed() else ""


def no_quota(cpus: float) -> str:
    """What is not applied where this user has no cgroup to set a quota in."""
    return f"{cpus:g} CPUs per node not applied: this user has no cgroup; all nodes share the cores equally"


def check_count(nodes: int) -> None:
    """Raise Unavailable if the subnet has no address for each node."""
    if not 1 <= nodes <= MAX_NODES:
        room = f"there is room for 1 to {MAX_NODES} in {SUBNET}"
        raise Unavailable(f"substrate netns: {nodes} nodes, {room}. Use --nodes {MAX_NODES} or fewer")


def _run_in_temporary_namespace(script: str) -> str:
    """Run a script in a new network namespace, which the kernel removes when the script ends; return its stdout."""
    return run([*user_namespace.temporary(), "sh", "-c", script], COMMAND_TIMEOUT_S)


class NetnsSubstrate:
    """One shaped namespace per node, with our owner mark in its name; leaving the context removes all of them."""

    name = "netns"
    shaped = True
    not_shaped = ""
    one_clock = True
    python = sys.executable

    def __init__(self, plans: Sequence[NodePlan], folder: Path | None = None, idle: int = 0) -> None:
        """`idle`: nodes of the run that get no rank."""
        if folder is not None:
            user_namespace.check_visible(folder)
        shares = [plan.cpus for plan in plans if plan.cpus is not None]
        self._has_quota = not without_quota()
        self.notes: Sequence[str] = [no_quota(shares[0])] if shares and not self._has_quota else ()
        self._copies = Copies(len(plans), idle if self.notes else 0)
        plans = [*plans, *self._copies.plans(plans[0])]
        self._plans = tuple(plans)
        self._switch = ownership.owned_name("switch")
        self._names = [ownership.owned_name(plan.name) for plan in plans]
        self._cores = affinity.assign_cores(plans, affinity.usable_cores())
        self._links = ShapedLinks(self._plans, self.exec, self._set_congestion)
        self._groups: dict[int, Cgroup] = {}  # nodes with a CPU quota
        self._late_groups: list[Cgroup] = []  # made for a fault, while processes run
        self._memory_groups: dict[int, Cgroup] = {}  # nodes with a memory limit
        self._started: list[LocalProcess] = []
        self._cleanup = ExitStack()
        self._handles = tuple(
            NodeHandle(
                name=plan.name,
                address=plan.address or f"10.77.0.{FIRST_HOST + k}",
                interface=plan.interface or INTERFACE,
            )
            for k, plan in enumerate(plans)
        )
        self.nodes: Sequence[NodeHandle] = self._handles[: self._copies.first]

    def __enter__(self) -> Self:
        with ExitStack() as undo:  # removes what exists so far if any of this fails
            undo.enter_context(user_namespace.held({ownership.VARIABLE: ownership.current()}))
            undo.callback(self._remove_late_groups)
            self._make_switch(undo)
            for node in range(len(self._plans)):
                self._make_node(node, undo)
                self._make_group(node, undo)
                self._links.shape(node)
            undo.callback(self.stop)  # processes end before the rest is removed
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _make_namespace(self, name: str, undo: ExitStack) -> None:
        if (user_namespace.named() / name).exists():
            rule = "another run in this Python process still uses it"
            raise TestbedError(f"namespace {name} already exists: {rule}. Wait until it has ended.")
        undo.callback(ownership.remove_namespace, name)
        _ip("netns", "add", name)
        _ip("netns", "exec", name, *NO_IPV6)
        _ip("-n", name, "link", "set", "lo", "up")

    def _make_switch(self, undo: ExitStack) -> None:
        self._make_namespace(self._switch, undo)
        for command in make_bridges(self._plans):
            self._in_switch(command)

    def _in_switch(self, command: Sequence[str]) -> str:
        return _ip("netns", "exec", self._switch, *command)

    def _make_node(self, node: int, undo: ExitStack) -> None:
        name, port, interface = self._names[node], f"port{node}", self._handles[node].interface
        self._make_namespace(name, undo)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", name)
        _ip("-n", self._switch, "link", "set", port, "master", bridge_of(self._plans[node]), "up")
        _ip("-n", name, "address", "add", f"{self._handles[node].address}/24", "dev", interface)
        _ip("-n", name, "link", "set", interface, "up")

    def _make_group(self, node: int, undo: ExitStack) -> None:
        cpus = self._plans[node].cpus
        if cpus is not None and self._has_quota:
            group = self._groups[node] = self._group(node, "cpu")
            undo.callback(group.remove)
            group.create()
            group.set_quota(cpus)

    def _group(self, node: int, controller: str) -> Cgroup:
        return Cgroup(find_hierarchy(controller=controller), f"{ownership.current()}/{self._plans[node].name}")

    def _set_congestion(self, node: int) -> None:
        """Set it by sysctl if the machine allows this name to all users, else on the route."""
        name, handle = self._plans[node].congestion, self._handles[node]
        if name is None:
            return
        try:
            self.exec(node, congestion(name))
        except TestbedError:
            subnet = str(ipaddress.IPv4Interface(f"{handle.address}/24").network)
            self.exec(node, route_congestion(name, subnet, handle.interface, handle.address))

    def exec(self, node: int, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command to its end inside the namespace, outside the CPU quota; return its stdout."""
        return run([*self._inside(node), *argv], timeout_s)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process inside the namespace.

        It joins its cgroup before it enters the namespace, because `ip netns exec` hides /sys/fs/cgroup.
        """
        join = self._groups[node].join_argv() if quota and node in self._groups else []
        with affinity.limited_to(self._cores[node] if quota else None):
            process = spawn([*join, *self._inside(node), *dies_with_parent(), *argv], env, log)
        self._started.append(process)
        if quota and node < self._copies.first and self._copies.nodes:
            jobs = [self._copies.job(copy, self._handles[copy].address, argv, env) for copy in self._copies.nodes]
            return WithCopies(process, [self.start(*job) for job in jobs])
        return process

    def port(self, wanted: int = 0) -> int:
        """Return `wanted` or DEFAULT_PORT, which is always free: a node shares its ports with no other."""
        return wanted or DEFAULT_PORT

    @property
    def late_quotas(self) -> bool:
        """True if a node has a quota."""
        return bool(self._groups)

    def limit_cpus(self, limited: bool) -> None:
        """Set or lift the quota of every node that has one."""
        for node, group in self._groups.items():
            group.set_quota(self._plans[node].cpus if limited else None)

    def prepare_folder(self, folder: Path) -> None:
        """Ranks run as this user and can use it; copies of a single node's job get folders in it."""
        self._copies.prepare(folder)

    def stop(self) -> None:
        """End every process that was started, then kill what is left in the cgroups."""
        try:
            stop(self._started)
        finally:
            self._started.clear()
            for group in self._groups.values():
                group.kill()

    def kill(self, node: int) -> None:
        """Send SIGKILL to everything in the namespace."""
        kill_until_gone(self._pids(node))

    def pause(self, node: int) -> None:
        """Send SIGSTOP to everything in the namespace."""
        send(self._pids(node)(), signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Send SIGCONT to everything in the namespace."""
        send(self._pids(node)(), signal.SIGCONT)

    def cut(self, node: int) -> None:
        """Set the switch's port down: the node keeps its address, routes and queues."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def reconnect(self, node: int) -> None:
        """Set the switch's port up."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "up")

    def shaping(self, node: int) -> Shaping:
        """The node's link as it is requested now, and as the kernel has it."""
        return self._links.read(node)

    def uplinks(self) -> Mapping[int, Shaping]:
        """The trunk of each rack as it is requested, and as the kernel has it."""
        if all(plan.uplink is None for plan in self._plans):
            return {}
        return read_uplinks(self._plans, self._in_switch(LIST_QDISCS), self._in_switch(LIST_COUNTERS))

    def counts(self, node: int) -> NodeCounts:
        """What the kernel counts in the namespace. Processes are not limited."""
        return replace(parse_counts(self.exec(node, READ_COUNTERS), INTERFACE), refused=None)

    def set_rate(self, node: int, rate: int | None) -> None:
        """Change the rate both ways while packets flow; None restores the planned rate."""
        self._links.set_rate(node, rate)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Change a node's quota while it runs; a node without a quota gets a cgroup now."""
        if node not in self._groups:
            self._groups[node] = self._late_group(node, "cpu")
        self._groups[node].set_quota(self._plans[node].cpus if cpus is None else cpus)

    def limit_memory(self, node: int) -> None:
        """Limit the node's memory: cgroups version 1 needs a second cgroup, version 2 uses that of the CPU quota."""
        group = self._groups.get(node)
        if group is None or find_hierarchy(controller="memory").version == 1:
            group = self._late_group(node, "memory")
        group.limit_memory(MEMORY_HEADROOM_BYTES)
        self._memory_groups[node] = group

    def unlimit_memory(self, node: int) -> None:
        """Remove the limit. With cgroups v2 the next attempt uses the same cgroup, so the limit must not stay."""
        if node in self._memory_groups:
            self._memory_groups.pop(node).limit_memory(None)

    def _late_group(self, node: int, controller: str) -> Cgroup:
        """Return a cgroup that contains the node's running processes."""
        group = self._group(node, controller)
        if not group.path.exists():
            group.create(controller)
            self._late_groups.append(group)
        group.add(self._pids(node)())
        return group

    def _remove_late_groups(self) -> None:
        for group in self._late_groups:
            group.kill()
            group.remove()

    def _inside(self, node: int) -> list[str]:
        return [*user_namespace.prefix(), "ip", "netns", "exec", self._names[node]]

    def _pids(self, node: int) -> Callable[[], list[int]]:
        return lambda: pids_in_namespace(self._names[node])


def _ip(*arguments: str) -> str:
    return run([*user_namespace.prefix(), "ip", *arguments], COMMAND_TIMEOUT_S)
