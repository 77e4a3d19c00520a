"""Who made this? A mark on everything a controller creates, by which leftovers are told from what is in use.

An owner is `<pid>-<start time>-<realm>`: a pid alone comes back after a while, together with the start time it does
not. The realm is where that pid means this process: one boot of one machine, one pid namespace. An engine may serve
several machines and containers, so what bears another realm's mark is in use for all we know.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "TESTBED_OWNER"  # in the environment of every process a substrate starts
PATTERN = re.compile(r"(\d+)-(\d+)(?:-([0-9a-f]{16}))?")  # marks of old have no realm: they count as ours
NETNS = Path("/run/netns")  # where `ip netns` keeps its named namespaces
_PROC = Path("/proc")


def _start_time(pid: int) -> str | None:
    """Clock ticks between boot and the process's start; None for one that is gone or only waits to be reaped."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command in front may hold spaces and brackets
    return None if fields[0] in "ZX" else fields[19]


@functools.cache
def _realm() -> str:
    """The boot id and the pid namespace's inode, made short: the mark is part of names."""
    boot, space = (_PROC / "sys/kernel/random/boot_id").read_text(), (_PROC / "self/ns/pid").stat().st_ino
    return hashlib.sha256(f"{boot.strip()} {space}".encode()).hexdigest()[:16]


def current() -> str:
    """The mark of this process."""
    return f"{os.getpid()}-{_start_time(os.getpid())}-{_realm()}"


def foreign(owner: str) -> bool:
    """True for the mark of another machine, boot or container: whether that process runs cannot be seen from here."""
    match = PATTERN.fullmatch(owner)
    return match is not None and match[3] not in (None, _realm())


def alive(owner: str) -> bool:
    """True while the process that made it still runs, or may."""
    match = PATTERN.fullmatch(owner)
    return foreign(owner) or (match is not None and _start_time(int(match[1])) == match[2])


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def marked() -> dict[int, str]:
    """Every live process that carries a mark in its environment, with its owner."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            match = re.search(rf"(?:^|\0){VARIABLE}=([^\0]*)".encode(), (_PROC / str(pid) / "environ").read_bytes())
            if match and _start_time(pid) is not None:
                found[pid] = match[1].decode(errors="replace")
    return found


def pids_in(namespace: str) -> list[int]:
    """Every live process inside a named network namespace."""
    found = []
    with contextlib.suppress(OSError):
        wanted = (NETNS / namespace).stat()
        for pid in _pids():
            with contextlib.suppress(OSError):
                if os.path.samestat((_PROC / str(pid) / "ns/net").stat(), wanted) and _start_time(pid) is not None:
                    found.append(pid)
    return found


def send(pids: list[int], signum: int) -> None:
    """Signal each by its pid; one that has ended meanwhile is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_until_gone(pids: Callable[[], list[int]], seconds: float = 5.0) -> list[int]:
    """SIGKILL what `pids()` lists until it lists nothing: a dying process may still have forked. Who was killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while (found := pids()) and time.monotonic() < deadline:
        send(found, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.01)
    return sorted(killed)
