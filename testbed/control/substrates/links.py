"""Shape the links of nodes on this machine, and read what the kernel counts there; used by netns.py and compose.py.

net/shaping.py makes the commands; the substrate passes the function that executes a command on a node.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from testbed.control.substrates.base import NodeCounts, NodePlan
from testbed.net.shaping import LIST_QDISCS, Shaping, read_buckets, reshape, shape
from testbed.spec.errors import CommandFailed, NetworkInvalid, TestbedError, Unavailable
from testbed.spec.link import Link

INTERFACE = "eth0"  # of a node that requests no other name
NETEM = "delay and loss (netem)"  # a feature of the kernel, in messages
NETEM_ELSEWHERE = ", or use --on uml, a kernel with netem that needs no rights (small models only)"
# What the kernel counts for a node; no process on the node can change it.
COUNTERS = ("/proc/net/dev", "/proc/net/snmp", "/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")
# Prints those that exist; `cat` alone would fail for the others.
READ_COUNTERS = ["sh", "-c", 'for file; do test ! -r "$file" || cat "$file"; done', "sh", *COUNTERS]
Execute = Callable[[int, list[str]], str]  # (node, argv) -> stdout


class ShapedLinks:
    """The links of all nodes; `execute` runs a command on a node, `set_congestion` sets its congestion control.

    Without `ingress` only what leaves a node is shaped.
    """

    def __init__(
        self,
        plans: Sequence[NodePlan],
        execute: Execute,
        set_congestion: Callable[[int], None],
        ingress: bool = True,
    ) -> None:
        self._plans = plans
        self._ingress = ingress
        self._execute = execute
        self._set_congestion = set_congestion
        self._rates = [plan.link.rate for plan in plans]  # as they are now

    def shape(self, node: int) -> None:
        """Shape the directions and set congestion control; raise NetworkInvalid with the node's name."""
        plan = self._plans[node]
        try:
            for command in shape(plan.link, plan.interface or INTERFACE, ingress=self._ingress):
                self._execute(node, command)
            self._set_congestion(node)
        except TestbedError as error:
            raise NetworkInvalid(f"{plan.name}: {error}") from None

    def read(self, node: int) -> Shaping:
        """The requested rate as it is now, and the buckets that the node has. Raises TestbedError."""
        return Shaping(self._rates[node], read_buckets(self._execute(node, LIST_QDISCS)))

    def set_rate(self, node: int, rate: int | None) -> None:
        """Change the rate both ways while packets flow; None restores the planned rate."""
        link, interface = self._plans[node].link, self._plans[node].interface or INTERFACE
        rate = link.rate if rate is None else rate
        for command in reshape(link, self._rates[node], rate, interface, ingress=self._ingress):
            self._execute(node, command)
        self._rates[node] = rate


def trials(plans: Iterable[NodePlan], ingress: bool = True) -> Iterator[tuple[list[list[str]], str]]:
    """Yield for each distinct link the commands that shape the loopback, and the kernel feature that they need.

    Where a rate is tried, the last command lists the buckets, as it is done before and after training.
    """
    links = [link for plan in plans for link in (plan.link, plan.uplink) if link is not None]
    for link in dict.fromkeys(link for link in links if link.shaped):
        if link.rate is not None:
            only_rate = Link(rate=link.rate, queue=link.queue)
            needs = "shaping (tbf, ifb, ingress, u32, mirred)" if ingress else "shaping (tbf)"
            yield [*shape(only_rate, "lo", ingress=ingress), LIST_QDISCS], needs
        if link.needs_netem:
            yield shape(link, "lo", ingress=ingress), NETEM


def try_commands(subject: str, commands: list[list[str]], feature: str, execute: Callable[[str], str]) -> None:
    """Run the commands as one shell script by `execute`, in a temporary network; it returns what they print.

    Raises Unavailable if one fails, or if the last is LIST_QDISCS and what it lists cannot be read. `subject` begins
    the message, e.g. "substrate netns: this machine's kernel".
    """
    try:
        printed = execute(" && ".join(shlex.join(command) for command in commands))
    except CommandFailed as error:
        reason = error.output.rpartition(": ")[2].replace("\n", " ").rstrip(".")
        way_out = f"Leave it out, or load the module{NETEM_ELSEWHERE if feature == NETEM else ''}"
        raise Unavailable(f"{subject} lacks {feature}: {reason}. {way_out}") from None
    if commands[-1] == LIST_QDISCS:
        try:
            read_buckets(printed)
        except NetworkInvalid as error:
            raise Unavailable(f"{subject.partition(':')[0]}: {error}") from None


def parse_counts(text: str, interface: str) -> NodeCounts:
    """Read the output of READ_COUNTERS; what is missing in it is None."""
    sent = received = unreachable = refused = None
    names: list[str] = []
    for line in text.splitlines():
        head, colon, rest = line.partition(":")
        fields = rest.split()
        if colon and head.strip() == interface and len(fields) > 8:
            received, sent = int(fields[0]), int(fields[8])
        elif head == "Ip" and "OutNoRoutes" in fields:
            names = fields
        elif head == "Ip" and names:
            unreachable = int(fields[names.index("OutNoRoutes")])
        elif line.startswith("max ") and line.split()[-1].isdecimal():
            refused = int(line.split()[-1])
    return NodeCounts(sent=sent, received=received, unreachable=unreachable, refused=refused)
