"""What killed controllers left behind: namespaces, cgroups, containers and processes, found by the owner's mark."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed.control.machine import cgroups, ownership
from testbed.control.substrates import engine
from testbed.control.substrates.netns import PREFIX, remove_namespace
from testbed.spec.errors import Unavailable

_NAMESPACE = re.compile(rf"{PREFIX}-({ownership.PATTERN.pattern})-.+")


@dataclass(frozen=True)
class Leftover:
    """One thing of ours; `kind` is process, namespace, cgroup, project (of containers) or folder."""

    kind: str
    name: str
    owner: str

    @property
    def in_use(self) -> bool:
        """True while the controller that made it runs or may, or the containers that `docker compose up` started."""
        return self.owner == engine.RUNNING or ownership.alive(self.owner)

    @property
    def foreign(self) -> bool:
        """Made on another machine, in another container or before a reboot: nobody here can tell if it is in use."""
        return ownership.foreign(self.owner)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def find(everything: bool = False) -> list[Leftover]:
    """What has no living owner; with `everything` also what is in use. Processes come first, they hold the rest."""
    found = [*_processes(), *_namespaces(), *_groups(), *_projects(), *_folders()]
    return [each for each in found if everything or not each.in_use]


def remove(everything: bool = False) -> list[Leftover]:
    """Kill and remove what `find` finds; what was removed, the processes inside each included."""
    removed: list[Leftover] = []
    for each in find(everything):
        killed = _remove(each)
        removed += [Leftover("process", str(pid), each.owner) for pid in killed]
        removed += [each] if each.kind != "process" else []
    return list(dict.fromkeys(removed))


def clear_engine() -> list[str]:
    """Remove containers whose controller is dead: their ranks train on, beside whoever is timed next. In words."""
    told = []
    for each in _projects():
        if each.foreign:
            told.append(f"{each} on this engine is of another machine, container or boot: it may have run beside")
        elif ownership.PATTERN.fullmatch(each.owner) and not each.in_use:
            _remove(each)
            told.append(f"{each} was removed before: its controller was dead, and its ranks may have trained on")
    return told


def _remove(each: Leftover) -> list[int]:
    if each.kind == "process":
        pid = int(each.name)
        return ownership.kill_until_gone(lambda: [pid] if ownership.marked().get(pid) == each.owner else [])
    if each.kind == "namespace":
        return remove_namespace(each.name)
    if each.kind == "folder":
        shutil.rmtree(each.name, ignore_errors=True)
        return []
    if each.kind == "project":
        engine.remove_project(each.name)
        return []
    killed: list[int] = []
    for hierarchy in _hierarchies():
        group = cgroups.CpuGroup(hierarchy, each.name.removeprefix(f"{cgroups.TOP}/"))
        killed += group.kill()
        group.remove()
    return killed


def _processes() -> list[Leftover]:
    return [
        Leftover("process", str(pid), who)
        for pid, who in ownership.marked().items()
        if ownership.PATTERN.fullmatch(who)
    ]


def _folders() -> list[Leftover]:
    """Compose files that were written for a project."""
    paths = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"))
    matches = [(path, _NAMESPACE.fullmatch(path.name)) for path in paths]
    return [Leftover("folder", str(path), match[1]) for path, match in matches if match]


def _projects() -> list[Leftover]:
    return [Leftover("project", name, who) for name, who in sorted(engine.projects().items())]


def _namespaces() -> list[Leftover]:
    names = sorted(entry.name for entry in ownership.NETNS.iterdir()) if ownership.NETNS.is_dir() else []
    matches = [match for match in map(_NAMESPACE.fullmatch, names) if match]
    return [Leftover("namespace", match[0], match[1]) for match in matches]


def _hierarchies() -> list[cgroups.Hierarchy]:
    """Where groups of ours may be: of the processor, and of memory where that is mounted apart."""
    found = []
    for controller in ("cpu", "memory"):
        with contextlib.suppress(Unavailable):
            found.append(cgroups.find_hierarchy(controller=controller))
    return list(dict.fromkeys(found))


def _groups() -> list[Leftover]:
    found = [
        Leftover("cgroup", str(folder.relative_to(hierarchy.path)), who)
        for hierarchy in _hierarchies()
        for who, folders in cgroups.owners(hierarchy).items()
        if ownership.PATTERN.fullmatch(who)
        for folder in folders or (hierarchy.top / who,)  # one that lost its nodes is a leftover, too
    ]
    return list(dict.fromkeys(found))
