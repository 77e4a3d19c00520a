"""What the kernel counts for a node, read by the controller: no process on the node can change it."""

from __future__ import annotations

from testbed.control.substrates.base import NodeCounts

FILES = ("/proc/net/dev", "/proc/net/snmp", "/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")
# Prints those that exist; `cat` alone would fail for the others.
COMMAND = ["sh", "-c", 'for file; do test ! -r "$file" || cat "$file"; done', "sh", *FILES]


def parse_counts(text: str, interface: str) -> NodeCounts:
    """Read the output of COMMAND; what is missing in it is None."""
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
