"""What the controller does for a user's own script: check it before the nodes are made, clean up, judge it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.control.machine import ownership
from testbed.control.runs.supervisor import RankObserver, RankState, ScriptRules
from testbed.control.substrates.base import Substrate
from testbed.results.folder import RunFolder
from testbed.results.observations import Files, Finding
from testbed.results.records import read
from testbed.spec.errors import RankFailed, TestbedError, Unavailable, refuse
from testbed.spec.file_tree import entries_below, remove_tree
from testbed.spec.run import RunSpec
from testbed.spec.script import SCRIPT_DEADLINE_S, Limits, ScriptSpec, check_tree
from testbed.spec.units import approximate_size

SIZE_EVERY_S = 0.5  # between two looks at the run folder, to which a script may be able to write


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
        raise Unavailable("testbed exec: the command setpriv, which removes privileges, is missing. Install util-linux")


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


class Allowance:
    """A RankObserver that raises RankFailed when a limit is exceeded; `inner` observes the ranks as well."""

    def __init__(self, limits: Limits | None, folder: Path, inner: RankObserver) -> None:
        self._limits, self._folder, self._inner = limits, folder, inner
        self._began = self._looked = time.monotonic()

    def poll(self, ranks: Sequence[RankState]) -> None:
        """Raise RankFailed for the first limit that is exceeded while a rank runs."""
        self._inner.poll(ranks)
        if self._limits is None or all(rank.code is not None for rank in ranks):
            return
        now = time.monotonic()
        if now - self._began > self._limits.seconds:
            raise RankFailed(f"the script ran longer than {self._limits.seconds:g} s, which is its limit")
        if now - self._looked > SIZE_EVERY_S:
            self._looked = now
            if size_of(self._folder) > self._limits.disk:
                raise RankFailed(f"the run folder is larger than {self._limits.disk >> 20} MiB, which is its limit")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; no link is followed."""
    total = 0
    for entry in entries_below(folder):
        with contextlib.suppress(OSError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


@contextmanager
def copies_removed() -> Iterator[None]:
    """At the end, remove working copies that a killed launcher has left on this machine."""
    try:
        yield
    finally:
        for left in Path(tempfile.gettempdir()).glob(f"{ownership.owned_name('script')}-*"):
            remove_tree(left)


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
