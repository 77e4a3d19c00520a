"""Which TCP congestion controls this machine's kernel has; containers and namespaces use the same kernel."""

from __future__ import annotations

import contextlib
import errno
import platform
import re
import socket
from pathlib import Path

from testbed.spec.errors import Unavailable
from testbed.spec.words import refuse_setting

LOADED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
MODULES = Path("/lib/modules")
NOT_CONGESTION = {"diag"}  # tcp_diag.ko is no congestion control


def check_congestion_control(name: str | None) -> None:
    """Raise Unavailable with the existing names if the kernel has no congestion control of this name."""
    if name is None or _accepted(name):
        return
    known = congestion_controls()
    if known and name not in known:
        rule = "this kernel has no such TCP congestion control"
        raise refuse_setting("node.congestion", name, rule, f"Use one of {', '.join(known)}.", Unavailable)


def congestion_controls() -> list[str]:
    """Return the names that are loaded or can be loaded as a module; empty if the kernel does not list them."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found.update(LOADED.read_text(encoding="ascii").split())
        with contextlib.suppress(OSError):
            listed = (MODULES / platform.release() / "modules.dep").read_text(encoding="utf-8", errors="replace")
            found.update(re.findall(r"^\S*/net/ipv4/tcp_(\w+)\.ko", listed, re.MULTILINE))
    return sorted(found - NOT_CONGESTION)


def _accepted(name: str) -> bool:
    """True if a socket accepts the name, or refuses it only for lack of privileges. As root this loads the module."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        return error.errno == errno.EPERM
    return True
