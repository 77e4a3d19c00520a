"""A network of this machine's own: one namespace per node, a bridge in another, links shaped both ways. Needs root.

    node0 [eth0 10.77.0.10] --veth-- [port0]
    node1 [eth0 10.77.0.11] --veth-- [port1]  bridge br0 in the switch namespace
    ...

The bridge has a namespace to itself because a container engine's FORWARD policy drops bridged traffic in the
machine's own. Every veth is made inside the namespaces: no link is ever seen outside, and all vanish with them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from testbed.control.machine import affinity, ownership
from testbed.control.machine.cgroups import CpuGroup, find_hierarchy, quota_and_period
from testbed.control.substrates.base import MEMORY_LEFT, NODE_PORT, NodeHandle, NodePlan, Process
from testbed.control.substrates.process import LocalProcess, SharedFiles, dies_with_parent, run, spawn, stop
from testbed.net.shaping import congestion, reshape, route_congestion, shape
from testbed.spec.errors import NetworkInvalid, TestbedError, Unavailable, require_extra
from testbed.spec.link import Link

PREFIX = "testbed"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "sysctl": "procps", "unshare": "util-linux"}
SUBNET = "10.77.0.0/24"
FIRST_HOST = 10  # node k has 10.77.0.(10 + k)
MAX_NODES = 240
TIMEOUT = 20.0  # seconds; each of these commands takes milliseconds
# No IPv6: its neighbour discovery would be in the byte counters. -e: a kernel without it is fine.
NO_IPV6 = ["sysctl", "-q", "-e", "-w", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]


def namespace(who: str, part: str) -> str:
    """The name of one namespace: `testbed-<owner>-node0`."""
    return f"{PREFIX}-{who}-{part}"


def check(plans: Sequence[NodePlan]) -> None:
    """Refuse what this machine cannot do, before anything lasting is created."""
    require_extra("substrate netns", "rank", "torch", "torchvision")
    check_network(plans)


def check_network(plans: Sequence[NodePlan]) -> None:
    """Refuse namespaces, links and CPU shares that this machine cannot make; ranks are left out."""
    if os.geteuid() != 0:
        raise Unavailable("substrate netns: network namespaces need root. Run as root, or use --on process (unshaped)")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise Unavailable(f"substrate netns: the command {tool} is missing. Install {package}")
    if not 1 <= len(plans) <= MAX_NODES:
        room = f"there is room for 1 to {MAX_NODES} in {SUBNET}"
        raise Unavailable(f"substrate netns: {len(plans)} nodes, {room}. Use --nodes {MAX_NODES} or fewer")
    for cpus in {plan.cpus for plan in plans if plan.cpus is not None}:
        find_hierarchy()
        quota_and_period(cpus)
    for commands, lacks in _rehearsals(plans):
        _rehearse(commands, lacks)


def _rehearsals(plans: Sequence[NodePlan]) -> Iterator[tuple[list[list[str]], str]]:
    """Each distinct thing asked, and what it means when it fails."""
    yield [["ip", "link", "set", "lo", "up"]], "network namespaces"
    yield [["ip", "link", "add", "br0", "type", "bridge"]], "bridges (bridge)"
    yield [["ip", "link", "add", "port0", "type", "veth", "peer", "name", "eth0"]], "virtual links (veth)"
    for name in sorted({plan.congestion for plan in plans if plan.congestion}):
        up = ["ip", "link", "set", "lo", "up"]
        yield [up, route_congestion(name, SUBNET, "lo")], f"congestion control {name} (tcp_{name})"
    links = list(dict.fromkeys(plan.link for plan in plans if plan.link.shaped))
    for link in links:
        if link.rate is not None:
            yield shape(Link(rate=link.rate, queue=link.queue), iface="lo"), "shaping (tbf, ifb, ingress, u32, mirred)"
        if link.needs_netem:
            yield shape(link, iface="lo"), "delay and loss (netem)"


def _rehearse(commands: list[list[str]], lacks: str) -> None:
    """Run them in a nameless namespace that ends with its only process."""
    script = " && ".join(shlex.join(command) for command in commands)
    try:
        run(["unshare", "--net", "sh", "-c", script], TIMEOUT)
    except TestbedError as error:
        reason = str(error).rpartition(": ")[2].replace("\n", " ").rstrip(".")
        raise Unavailable(
            f"substrate netns: this machine's kernel lacks {lacks}: {reason}. Leave it out, or load the module"
        ) from None


class NetnsSubstrate(SharedFiles):
    """N shaped namespaces under one owner mark; whatever happens inside `with`, nothing of them remains."""

    name = "netns"
    shaped = True
    one_clock = True
    python = sys.executable
    notes: Sequence[str] = ()

    def __init__(self, plans: Sequence[NodePlan], folder: Path | None = None) -> None:
        self._plans = tuple(plans)
        self._owner = ownership.current()
        self._switch = namespace(self._owner, "switch")
        self._names = [namespace(self._owner, plan.name) for plan in plans]
        self._cores = affinity.share_out(plans, affinity.here())
        self._groups: dict[int, CpuGroup] = {}  # with a quota
        self._late: list[CpuGroup] = []  # made for a fault
        self._starved: dict[int, CpuGroup] = {}  # with a memory limit
        self._rates = {node: plan.link.rate for node, plan in enumerate(plans)}  # now
        self._started: list[LocalProcess] = []
        self._cleanup = ExitStack()
        self.nodes: Sequence[NodeHandle] = tuple(
            NodeHandle(name=plan.name, address=f"10.77.0.{FIRST_HOST + k}", interface="eth0")
            for k, plan in enumerate(plans)
        )

    def __enter__(self) -> Self:
        check(self._plans)
        with ExitStack() as undo:  # unwinds what exists so far if any of this fails
            undo.callback(self._remove_late)
            self._make_switch(undo)
            for node, plan in enumerate(self._plans):
                self._make_node(node, undo)
                self._make_group(node, plan, undo)
                self._shape(node, plan)
            undo.callback(self.stop)  # first to go: the processes
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _make_namespace(self, name: str, undo: ExitStack) -> None:
        if (ownership.NETNS / name).exists():
            raise TestbedError(f"namespace {name} exists: this process has a netns substrate open. Close it first")
        undo.callback(remove_namespace, name)
        _ip(["netns", "add", name])
        _ip(["netns", "exec", name, *NO_IPV6])
        _ip(["-n", name, "link", "set", "lo", "up"])

    def _make_switch(self, undo: ExitStack) -> None:
        self._make_namespace(self._switch, undo)
        # forward_delay 0: a port carries traffic at once; no snooping: no queries among the measured bytes.
        options = ["forward_delay", "0", "mcast_snooping", "0"]
        _ip(["-n", self._switch, "link", "add", "br0", "type", "bridge", *options])
        _ip(["-n", self._switch, "link", "set", "br0", "up"])

    def _make_node(self, node: int, undo: ExitStack) -> None:
        name, port = self._names[node], f"port{node}"
        self._make_namespace(name, undo)
        _ip(["-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name])
        _ip(["-n", self._switch, "link", "set", port, "master", "br0", "up"])
        _ip(["-n", name, "address", "add", f"{self.nodes[node].address}/24", "dev", "eth0"])
        _ip(["-n", name, "link", "set", "eth0", "up"])

    def _make_group(self, node: int, plan: NodePlan, undo: ExitStack) -> None:
        if plan.cpus is not None:
            group = CpuGroup(find_hierarchy(), f"{self._owner}/{plan.name}")
            undo.callback(group.remove)
            group.create(plan.cpus)
            self._groups[node] = group

    def _shape(self, node: int, plan: NodePlan) -> None:
        try:
            for command in shape(plan.link, self.nodes[node].interface):
                self.exec(node, command, TIMEOUT)
            if plan.congestion is not None:
                self._set_congestion(node, plan.congestion)
        except TestbedError as error:
            raise NetworkInvalid(f"{plan.name}: {error}") from None

    def _set_congestion(self, node: int, name: str) -> None:
        """By sysctl where the machine allows `name`, else through the route."""
        try:
            self.exec(node, congestion(name), TIMEOUT)
        except TestbedError:
            handle = self.nodes[node]
            self.exec(node, route_congestion(name, SUBNET, handle.interface, handle.address), TIMEOUT)

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end inside the namespace, outside the CPU quota."""
        return run([*self._inside(node), *argv], timeout)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process inside the namespace; the group is joined first, `ip netns exec` hides /sys/fs/cgroup."""
        joins = self._groups[node].prefix() if quota and node in self._groups else []
        with affinity.limited_to(self._cores[node] if quota else None):
            process = spawn([*joins, *self._inside(node), *dies_with_parent(), *argv], env, log)
        self._started.append(process)
        return process

    def kill(self, node: int) -> None:
        """SIGKILL everything in the namespace."""
        ownership.kill_until_gone(self._pids(node))

    def pause(self, node: int) -> None:
        """Freeze everything in the namespace."""
        ownership.send(self._pids(node)(), signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let it go on."""
        ownership.send(self._pids(node)(), signal.SIGCONT)

    def cut(self, node: int) -> None:
        """Pull the cable at the switch: the node keeps its address, routes and queues."""
        _ip(["-n", self._switch, "link", "set", f"port{node}", "down"])

    def join(self, node: int) -> None:
        """Plug the cable in again."""
        _ip(["-n", self._switch, "link", "set", f"port{node}", "up"])

    def set_rate(self, node: int, rate: int | None) -> None:
        """Another rate, each way, while packets flow."""
        plan = self._plans[node]
        rate = plan.link.rate if rate is None else rate
        for command in reshape(plan.link, self._rates[node], rate, self.nodes[node].interface):
            self.exec(node, command, TIMEOUT)
        self._rates[node] = rate

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Change a node's share while it runs; one without a share gets a group now."""
        if node not in self._groups:
            self._groups[node] = self._late_group(node, "cpu")
        self._groups[node].set_quota(self._plans[node].cpus if cpus is None else cpus)

    def limit_memory(self, node: int) -> None:
        """By the memory controller: a group of its own in version 1, the node's only one in version 2."""
        group = self._groups.get(node)
        if group is None or find_hierarchy(controller="memory").version == 1:
            group = self._late_group(node, "memory")
        group.set_memory(MEMORY_LEFT)
        self._starved[node] = group

    def unlimit_memory(self, node: int) -> None:
        """A node has no limit of its own; who starts next in version 2 does so in the same group."""
        if node in self._starved:
            self._starved.pop(node).set_memory(None)

    def _late_group(self, node: int, controller: str) -> CpuGroup:
        """A group for what runs already."""
        group = CpuGroup(find_hierarchy(controller=controller), f"{self._owner}/{self._plans[node].name}")
        if not group.path.exists():
            group.make()
            self._late.append(group)
        group.take_in(self._pids(node)())
        return group

    def _remove_late(self) -> None:
        for group in self._late:
            group.kill()
            group.remove()

    def _inside(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[node]]

    def _pids(self, node: int) -> Callable[[], list[int]]:
        return lambda: ownership.pids_in(self._names[node])

    def port(self, wanted: int = 0) -> int:
        """A node has its ports to itself."""
        return wanted or NODE_PORT

    def share(self, folder: Path) -> None:
        """Ranks are who we are."""

    def stop(self) -> None:
        """End every process that was started, in the namespaces and groups."""
        try:
            stop(self._started)
        finally:
            self._started.clear()
            for group in self._groups.values():
                group.kill()


def remove_namespace(name: str) -> list[int]:
    """Kill what runs inside, then remove it with every link and queue it holds; who was killed."""
    killed = ownership.kill_until_gone(lambda: ownership.pids_in(name))
    if (ownership.NETNS / name).exists():
        _ip(["netns", "delete", name])
    return killed


def _ip(arguments: list[str]) -> None:
    run(["ip", *arguments], TIMEOUT)
