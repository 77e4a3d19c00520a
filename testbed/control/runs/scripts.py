"""What the controller does for a user's own script: check it before the nodes are made, clean up, judge it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.control.machine import ownership
from testbed.control.runs.supervisor import ScriptRules
from testbed.control.substrates.base import Substrate
from testbed.results.finding import Finding
from testbed.results.folder import RunFolder
from testbed.results.observations import Files
from testbed.results.records import read
from testbed.spec.errors import TestbedError, Unavailable, refuse
from testbed.spec.methods import method_path
from testbed.spec.mode import ALGORITHMS
from testbed.spec.run import RunSpec
from testbed.spec.script import SCRIPT_DEADLINE_S, ScriptSpec
from testbed.spec.tree import check_tree
from testbed.spec.units import approximate_size


def check(script: ScriptSpec, here: bool) -> None:
    """Refuse a script that cannot be started. `here`: it runs on this machine, with this machine's commands."""
    folder, program = Path(script.folder), script.program
    if program and "{" not in program and not (folder / program).is_file():
        rule = f"there is no such file in {folder}"
        raise refuse("script", program, rule, "Start testbed in the script's folder, or give its path.")
    if not folder.is_dir():
        raise refuse("folder", script.folder, "there is no such folder", "Start testbed in the script's folder.")
    check_tree(folder, script.exclude)
    if not here:
        return
    first = script.argv[0]
    if shutil.which(first, path=script.path or None) is None and not os.access(folder / first, os.X_OK):
        rule = f"there is no such command. PATH is {script.path or os.environ.get('PATH', os.defpath)}"
        raise refuse("command", first, rule, "Give its path, or activate the environment that has it.")
    if shutil.which("setpriv") is None:
        raise Unavailable("testbed exec: the command setpriv is missing, which takes privileges. Install util-linux")


def put_method(spec: RunSpec, folder: RunFolder) -> None:
    """Copy the user's own method into the run's folder, where the launcher of every node finds it."""
    if spec.script is not None and not spec.mode.is_script and spec.mode.algorithm not in ALGORITHMS:
        file = method_path(spec.mode.algorithm)
        folder.methods.mkdir(exist_ok=True)
        shutil.copyfile(file, folder.methods / file.name)


def handed(script: ScriptSpec) -> dict[str, str]:
    """The variables of the caller that he hands to the script by name."""
    missing = [name for name in script.handed if name not in os.environ]
    if missing:
        raise refuse("variable", missing[0], "is not set here", f"Write --env {missing[0]}=VALUE, or leave it out.")
    return {name: os.environ[name] for name in script.handed}


def rules(spec: RunSpec, substrate: Substrate) -> ScriptRules:
    """How the ranks of a script are supervised."""
    deadline = spec.deadline or SCRIPT_DEADLINE_S
    start = max(deadline, spec.start_deadline)
    return ScriptRules(deadline_s=deadline, start_s=start, one_clock=substrate.one_clock)


@contextmanager
def copies_removed() -> Iterator[None]:
    """At the end, remove working copies that a killed launcher has left on this machine."""
    try:
        yield
    finally:
        for left in Path(tempfile.gettempdir()).glob(f"{ownership.owned_name('script')}-*"):
            shutil.rmtree(left, ignore_errors=True)


def notes(spec: RunSpec, folder: RunFolder) -> list[str]:
    """Which files of a script were not collected."""
    found: list[str] = []
    for rank in range(spec.world if spec.script else 0):
        with contextlib.suppress(TestbedError, OSError):
            for record in read(folder.records(rank)):
                if isinstance(record, Files) and record.left_out:
                    kept = f"{record.count} files ({approximate_size(record.bytes)}) are in {folder.files(rank).name}"
                    found.append(f"rank {rank}: {kept}, {record.left_out} are not: {'; '.join(record.reasons)}")
    return found


def findings(spec: RunSpec, folder: RunFolder) -> list[Finding]:
    """What a user's script does wrong, and what costs it time; nothing if its records cannot be read."""
    if spec.script is None:
        return []
    from testbed.report.script_findings import find_in

    with contextlib.suppress(TestbedError, OSError):  # `conclude` reads them as well, and says what is wrong
        return find_in(folder)
    return []
