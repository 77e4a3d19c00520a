"""`testbed doctor`: what this machine can and cannot do, each with the fix. It creates nothing that stays."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

from testbed.control.machine import user_namespace
from testbed.control.machine.cgroups import find_hierarchy
from testbed.control.substrates import engine, netns, slurm, uml
from testbed.control.substrates.base import NodePlan
from testbed.spec.datasets import DATASETS, data_dir, is_complete
from testbed.spec.errors import TestbedError, Unavailable
from testbed.spec.link import Link
from testbed.spec.units import parse_rate


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, whether it is there, what was found, how to fix it."""

    what: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run all checks and return the findings, the basic ones first."""
    engine_findings = _engine()
    namespaces = _namespaces(containers=all(finding.ok for finding in engine_findings))
    shaping = _link("shaping both ways (tbf, ifb)", Link(rate=parse_rate("100mbit")), "a kernel with sch_tbf and ifb")
    netem = _link("delay and loss (netem)", Link(delay=0.01), "a kernel with sch_netem; rates work without it")
    return [
        _python(),
        _cores(),
        _torch(),
        *_data(),
        namespaces,
        *_tools(),
        shaping,
        netem,
        _cgroups(),
        *engine_findings,
        _slurm(),
        _uml(),
    ]


def _python() -> Finding:
    version, fix = platform.python_version(), "install python3.11 and run make again"
    return Finding("Python 3.11 or later", sys.version_info >= (3, 11), version, fix)


def _cores() -> Finding:
    cores = os.cpu_count() or 1
    return Finding("two cores or more", cores >= 2, str(cores), "runs work, but shares of one core are coarse")


def _torch() -> Finding:
    """Look up the installed version without importing torch, which the controller does not need."""
    try:
        return Finding("torch", True, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch", False, "not installed, so no rank can start here", "make venv, or pip install 'testbed[rank]'"
        )


def _data() -> list[Finding]:
    complete = {name: is_complete(name, data_dir()) for name in DATASETS}
    return [
        Finding(f"data {name}", ok, "ready" if ok else "missing", f"testbed data get {name}")
        for name, ok in complete.items()
    ]


def _namespaces(containers: bool) -> Finding:
    try:
        netns.check_namespaces()
    except Unavailable as error:
        return namespaces_finding(str(error).removeprefix("substrate netns: "), "", containers)
    works = "works without root, in a user namespace" if user_namespace.needed() else "works, as root"
    return namespaces_finding("", works, containers)


def namespaces_finding(refusal: str, works: str, containers: bool) -> Finding:
    """Return whether namespaces can be made; if not, why, and where ranks run: in containers or as processes."""
    instead = "in containers" if containers else "as plain processes on loopback, unshaped"
    why, _, fix = refusal.partition(". ")
    return Finding("network namespaces", not refusal, f"no: {why}; ranks run {instead}" if refusal else works, fix)


def _tools() -> list[Finding]:
    return [
        Finding(f"command {tool}", path is not None, path or "missing", f"install {netns.TOOLS[tool]}")
        for tool, path in netns.tools().items()
    ]


def _link(what: str, link: Link, fix: str) -> Finding:
    """Try to shape this link in a temporary namespace."""
    try:
        netns.check_network([NodePlan(name="node0", link=link)])
        return Finding(what, True, "works")
    except TestbedError as error:
        return Finding(what, False, str(error).removeprefix("substrate netns: "), fix)


def _cgroups() -> Finding:
    try:
        found = find_hierarchy()
        return Finding("CPU shares", True, f"cgroups v{found.version} in {found.path}")
    except TestbedError as error:
        why, _, fix = str(error).partition(". ")
        return Finding("CPU shares", False, why, fix)


def _slurm() -> Finding:
    what, fix = "Slurm (for --on slurm)", "not needed elsewhere; on a cluster use its login node"
    try:
        return Finding(what, True, f"partitions {', '.join(slurm.partitions())}")
    except TestbedError as error:
        return Finding(what, False, str(error).removeprefix("substrate slurm: ").partition(". ")[0], fix)


def _uml() -> Finding:
    """Start the kernel, which takes some seconds."""
    what = "user-mode Linux (for --on uml)"
    try:
        uml.check([])
        with uml.Kernel(uml.BYTES_OF_KERNEL):
            return Finding(what, True, "works, with delay and loss, on one processor")
    except TestbedError as error:
        why, _, fix = str(error).removeprefix("substrate uml: ").partition(". ")
        return Finding(what, False, why, fix)


def _engine() -> list[Finding]:
    def try_check(what: str, check: Callable[[], str]) -> Finding:
        try:
            return Finding(what, True, check())
        except Unavailable as error:
            found, _, fix = str(error).removeprefix("substrate compose: ").partition(". ")
            return Finding(what, False, found, fix)

    return [
        try_check("Docker engine", engine.engine_version),
        try_check("Docker Compose v2", engine.compose_version),
        try_check(f"image {engine.image_name()}", engine.image_content),
    ]
