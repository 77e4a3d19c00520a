"""Doctor: what this machine can and cannot do, with the fix. It creates nothing that lasts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from testbed.control.machine.cgroups import find_hierarchy
from testbed.control.substrates import netns
from testbed.control.substrates.base import NodePlan
from testbed.spec.datasets import DATASETS, data_dir, is_complete
from testbed.spec.errors import TestbedError, Unavailable
from testbed.spec.link import Link
from testbed.spec.units import parse_rate


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is there, what was found, what to do about it."""

    what: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """Every check, in the order a person would ask."""
    engine = _engine()
    root = _root(containers=all(finding.ok for finding in engine))
    return [_python(), _cores(), _torch(), *_data(), root, *_tools(), _shaping(), _netem(), _cgroups(), *engine]


def _python() -> Finding:
    version = platform.python_version()
    return Finding(
        "Python 3.11 or later", sys.version_info >= (3, 11), version, "install python3.11 and run make again"
    )


def _cores() -> Finding:
    cores = os.cpu_count() or 1
    return Finding("two cores or more", cores >= 2, str(cores), "runs work, but shares of one core are coarse")


def _torch() -> Finding:
    """Looked up, not imported: the controller runs without it."""
    try:
        return Finding("torch", True, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch", False, "not installed, so no rank can start here", "make venv, or pip install 'testbed[rank]'"
        )


def _data() -> list[Finding]:
    here = {name: is_complete(name, data_dir()) for name in DATASETS}
    return [
        Finding(f"data {name}", ok, "ready" if ok else "missing", f"testbed data get {name}")
        for name, ok in here.items()
    ]


def _root(containers: bool) -> Finding:
    """Without it a run takes the best of what is left."""
    root = os.geteuid() == 0
    instead = "in containers" if containers else "as plain processes on loopback, unshaped"
    return Finding("root (for network namespaces)", root, "yes" if root else f"no: ranks run {instead}", "run as root")


def _tools() -> list[Finding]:
    def look(tool: str, package: str) -> Finding:
        path = shutil.which(tool)
        return Finding(f"command {tool}", path is not None, path or "missing", f"install {package}")

    return [look(tool, package) for tool, package in netns.TOOLS.items()]


def _shaping() -> Finding:
    return _rehearsed("shaping both ways (tbf, ifb)", Link(rate=parse_rate("100mbit")), "a kernel with sch_tbf and ifb")


def _netem() -> Finding:
    return _rehearsed("delay and loss (netem)", Link(delay=0.01), "a kernel with sch_netem; rates work without it")


def _rehearsed(what: str, link: Link, fix: str) -> Finding:
    try:
        netns.check_network([NodePlan(name="node0", link=link)])
        return Finding(what, True, "works")
    except TestbedError as error:
        return Finding(what, False, str(error).removeprefix("substrate netns: "), fix)


def _engine() -> list[Finding]:
    from testbed.control.substrates import engine  # the engine's SDK takes a while to import

    def look(what: str, check: Callable[[], str]) -> Finding:
        try:
            return Finding(what, True, check())
        except Unavailable as error:
            found, _, fix = str(error).removeprefix("substrate compose: ").partition(". ")
            return Finding(what, False, found, fix)

    return [
        look("Docker engine", engine.engine_version),
        look("Docker Compose v2", engine.compose_version),
        look(f"image {engine.IMAGE}", engine.image_content),
    ]


def _cgroups() -> Finding:
    try:
        found = find_hierarchy()
        return Finding("CPU shares", os.geteuid() == 0, f"cgroups v{found.version} in {found.path}", "run as root")
    except TestbedError as error:
        return Finding("CPU shares", False, str(error), "mount the cpu controller")
