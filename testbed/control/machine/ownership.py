"""Ownership: a mark on everything a controller creates, and what dead controllers left behind, found by that mark.

An owner is `<pid>-<start time>-<realm>`. A pid alone is used again after a while; together with its start time it is
unique. The realm identifies a boot of a machine and a pid namespace; only there can the pid be looked up. Machines and
containers may share an engine, so resources with the mark of another realm count as in use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from testbed.control.machine import cgroups, user_namespace
from testbed.control.machine.processes import PROC, all_pids, kill_until_gone, pids_in_namespace, run, start_time
from testbed.control.substrates import engine
from testbed.control.substrates.clone import ROOT
from testbed.spec.file_tree import remove_tree

VARIABLE = "TESTBED_OWNER"  # in the environment of every process that a substrate starts
LAUNCHER = "TESTBED_LAUNCHER"  # in every process of a user's script (attach/launch.py): the pid of its launcher
PACKAGE_PATH = "PYTHONPATH"  # begins with the folder of the clone in every such process
PREFIX = "testbed"
PATTERN = re.compile(r"(\d+)-(\d+)-([0-9a-f]{16})")
OWNED_NAME = re.compile(rf"{PREFIX}-({PATTERN.pattern})-.+")
COMMAND_TIMEOUT_S = 20.0
CLONE = ROOT  # the folder of this clone
BY_HAND = {  # kind of a resource: the command that removes it
    "process": "kill {}",
    "namespace": "ip netns delete {}",
    "cgroup": "find /sys/fs/cgroup -depth -path '*/{}' -exec rmdir {{}} ;",
    "project": "docker compose --project-name {} down",
    "folder": "rm -r {}",
}


def realm(proc: Path = PROC) -> str:
    """Return a hash of the boot id and the pid namespace's inode, shortened because it is part of names."""
    boot, namespace = (proc / "sys/kernel/random/boot_id").read_text(), (proc / "self/ns/pid").stat().st_ino
    return hashlib.sha256(f"{boot.strip()} {namespace}".encode()).hexdigest()[:16]


_own_realm = functools.cache(realm)


def current() -> str:
    """Return the mark of this process."""
    return f"{os.getpid()}-{start_time(os.getpid())}-{_own_realm()}"


def owned_name(suffix: str) -> str:
    """Return a name for a resource that this process creates: `testbed-<owner>-<suffix>`."""
    return f"{PREFIX}-{current()}-{suffix}"


def other_host(owner: str) -> bool:
    """Return True for a mark of another machine, boot or container, whose processes /proc does not list here."""
    match = PATTERN.fullmatch(owner)
    return match is not None and match[3] != _own_realm()


def alive(owner: str) -> bool:
    """Return True if the owner's process runs, or is on another host and may run."""
    match = PATTERN.fullmatch(owner)
    return other_host(owner) or (match is not None and _runs(int(match[1]), match[2]))


def _runs(pid: int, started: str) -> bool:
    """Return True if a process has that pid and start time, or if /proc hides it because it is another user's."""
    found = start_time(pid)
    if found is None:
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
    return found == started


def owned_processes() -> dict[int, str]:
    """Return the pids of all live processes with a mark in their environment, and their owners."""
    return {pid: environment[VARIABLE] for pid, environment in _marked_environments().items()}


def current_processes() -> dict[int, str]:
    """Return the pids of all live processes with the mark of this process, and the pid of their script's launcher."""
    marked = _marked_environments().items()
    return {pid: each.get(LAUNCHER, "") for pid, each in marked if each[VARIABLE] == current()}


def _marked_environments() -> dict[int, dict[str, str]]:
    """Return the environments of live processes with a mark, by pid; those that this user may not read are missing."""
    found = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):
            content = (PROC / str(pid) / "environ").read_bytes()
            if VARIABLE.encode() in content and start_time(pid) is not None:
                words = content.decode(errors="replace").split("\0")
                environment = {key: value for key, _, value in (word.partition("=") for word in words)}
                if VARIABLE in environment:
                    found[pid] = environment
    return found


def kill_processes(owner: str) -> list[int]:
    """Kill all processes with this mark, also inside containers; return their pids."""
    return kill_until_gone(lambda: [pid for pid, found in owned_processes().items() if found == owner])


def remove_namespace(name: str) -> list[int]:
    """Kill what runs in a network namespace and delete it with its links and queues; return the killed pids."""
    killed = kill_until_gone(lambda: pids_in_namespace(name))
    if (user_namespace.named() / name).exists():
        run([*user_namespace.prefix(), "ip", "netns", "delete", name], COMMAND_TIMEOUT_S)
    return killed


@dataclass(frozen=True)
class OwnedResource:
    """A resource that a controller made; `kind` is process, namespace, cgroup, project (of containers) or folder."""

    kind: str
    name: str
    owner: str
    clone: str | None = None  # the folder of the clone that made it; None if it is not known

    @property
    def marked(self) -> bool:
        """True if a controller made it, False if `docker compose up` did."""
        return PATTERN.fullmatch(self.owner) is not None

    @property
    def in_use(self) -> bool:
        """True if its controller runs or may run, or if `docker compose up` made it and its containers run."""
        return self.owner == engine.RUNNING or alive(self.owner)

    @property
    def other_host(self) -> bool:
        """True if it was made on another machine, in another container or before a reboot."""
        return other_host(self.owner)

    @property
    def of_this_clone(self) -> bool:
        return self.clone is not None and Path(self.clone).resolve() == CLONE

    def removable(self, everything: bool = False) -> bool:
        """Return True for what is dead, and for what this clone has stopped; with `everything` also if it is in use."""
        if self.marked and not self.in_use:
            return True
        return self.of_this_clone and (everything or not self.in_use)

    def why(self) -> str:
        """Say why it can be removed, or why it stays."""
        if not self.marked:
            state = "runs" if self.in_use else "is stopped"
            where = f"in {self.clone}" if self.clone else "in a folder that is not recorded"
            return f"`docker compose up` made it {where}, and it {state}"
        if self.other_host:
            return "it belongs to another machine, container or boot, which may use it"
        made = f", made in {self.clone}" if self.clone else ""
        controller = f"its controller (process {self.owner.partition('-')[0]}{made})"
        return f"{controller} {'runs' if self.in_use else 'is dead'}"

    def way_out(self) -> str:
        """Say how to remove what stays."""
        if self.of_this_clone:
            return "Remove it with --all"
        if self.clone is None:  # `testbed clean` would keep it in every clone
            return f"If nothing uses it, remove it with `{BY_HAND[self.kind].format(self.name)}`"
        command = "testbed clean --all" if self.marked else BY_HAND["project"].format(self.name)
        return f"Remove it with `{command}` in {self.clone}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def remove(self) -> list[int]:
        """Kill and remove it; return the pids of the killed processes."""
        match self.kind:
            case "process":
                pid = int(self.name)
                return kill_until_gone(lambda: [pid] if owned_processes().get(pid) == self.owner else [])
            case "namespace":
                return remove_namespace(self.name)
            case "cgroup":
                return self._remove_cgroup()
            case "project":
                engine.remove_project(engine.Project(self.name, self.owner, self.clone))
            case "folder":
                remove_tree(Path(self.name))
        return []

    def _remove_cgroup(self) -> list[int]:
        killed = []
        for hierarchy in cgroups.mounted_hierarchies():
            group = cgroups.Cgroup(hierarchy, self.name.removeprefix(f"{cgroups.TOP}/"))
            killed += group.kill()
            group.remove()
        return killed


def find_processes() -> list[OwnedResource]:
    """Live processes with a mark."""
    found = [(pid, each[VARIABLE], each.get(PACKAGE_PATH, "")) for pid, each in _marked_environments().items()]
    return [
        OwnedResource("process", str(pid), owner, path.split(os.pathsep)[0] or None)
        for pid, owner, path in found
        if PATTERN.fullmatch(owner)
    ]


def find_namespaces() -> list[OwnedResource]:
    """Named network namespaces with a mark."""
    folder = user_namespace.named()
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [OwnedResource("namespace", match[0], match[1]) for match in map(OWNED_NAME.fullmatch, names) if match]


def find_cgroups() -> list[OwnedResource]:
    """The cgroups of nodes; the folder of an owner counts if it has no node any more."""
    found = [
        OwnedResource("cgroup", str(folder.relative_to(hierarchy.path)), owner)
        for hierarchy in cgroups.mounted_hierarchies()
        for owner, folders in cgroups.owners(hierarchy).items()
        if PATTERN.fullmatch(owner)
        for folder in folders or (hierarchy.top / owner,)
    ]
    return list(dict.fromkeys(found))


def find_projects() -> list[OwnedResource]:
    """Compose projects on the Docker engine."""
    return [OwnedResource("project", each.name, each.owner, each.folder) for each in engine.projects()]


def find_folders() -> list[OwnedResource]:
    """Temporary folders with the compose files of a project."""
    paths = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"))
    matches = [(path, OWNED_NAME.fullmatch(path.name)) for path in paths]
    return [OwnedResource("folder", str(path), match[1]) for path, match in matches if match]


# Processes come first because the other things cannot be removed while a process uses them.
FINDERS: Sequence[Callable[[], list[OwnedResource]]] = (
    find_processes,
    find_namespaces,
    find_cgroups,
    find_projects,
    find_folders,
)


def find(everything: bool = False) -> list[OwnedResource]:
    """List what is removable; with `everything` all that has a mark or that `docker compose up` made."""
    found = [each for finder in FINDERS for each in finder()]
    # Only processes and projects record their clone. What else has the same mark is of the same controller.
    clones = {each.owner: each.clone for each in found if each.marked and each.clone}
    known = [replace(each, clone=clones.get(each.owner, each.clone)) for each in found]
    return known if everything else [each for each in known if each.removable()]


def remove(everything: bool = False) -> list[OwnedResource]:
    """Kill and remove what is removable; return what was removed, with each killed process as an entry of its own."""
    removed: list[OwnedResource] = []
    for each in (each for each in find(everything=True) if each.removable(everything)):
        killed = each.remove()
        removed += [OwnedResource("process", str(pid), each.owner, each.clone) for pid in killed]
        removed += [each] if each.kind != "process" else []
    return list(dict.fromkeys(removed))


def end_orphans() -> list[str]:
    """Kill the processes of dead controllers, because they use the processor; return notes.

    Ranks in containers outlive an engine that is killed, and the next engine may not know them. A mark that this
    process has inherited is left out: the user's shell has it too.
    """
    notes = []
    inherited = os.environ.get(VARIABLE)
    for owner in sorted({each.owner for each in find_processes() if not each.in_use} - {inherited}):
        killed = kill_processes(owner)
        if killed:
            pids = ", ".join(map(str, killed))
            notes.append(f"killed before the run: what a dead controller had left running (pid {pids})")
    return notes


def remove_dead_projects(projects: Sequence[OwnedResource]) -> list[str]:
    """Remove containers whose controller is dead, because their ranks still use the processor; return notes.

    Projects of another host stay, and a note says so. Those that `docker compose up` made also stay: their logs are
    the user's.
    """
    notes = []
    for each in projects:
        if each.other_host:
            other = "belongs to another machine, container or boot"
            notes.append(f"{each} on this engine {other}: it may have used the CPU during the run")
        elif each.marked and not each.in_use:
            each.remove()
            notes.append(
                f"{each} was removed before the run: its controller was dead, and its ranks still used the CPU"
            )
    return notes
