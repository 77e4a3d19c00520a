"""Copies of the job of a single node, on the nodes that would be idle: each then has an equal share of the machine.

A single node with a CPU quota computes as fast as one of N nodes. Where no quota can be set, it would have a core of
its own, and be no baseline. So N - 1 copies of it run at the same time, each in a folder `copyK` of the run's folder
with records of its own. Only the figures of the first count; `conclude` counts the copies, the table says that they
ran, and a run of which a copy did not run to its end is invalid.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from testbed.control.substrates.base import NodePlan, Process
from testbed.results.folder import RunFolder
from testbed.spec.link import Link

GRACE_S = 60.0  # for the copies to end after the first; they begin together and do the same


class Copies:
    """Where copies run: `count` nodes after the `first` ones of the run."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.nodes = range(first, first + count)
        self._original = RunFolder(Path())

    def prepare(self, folder: Path) -> None:
        """Make a folder for each copy in the run's folder: they say that the run has copies, also if none starts."""
        self._original = RunFolder(folder.resolve())
        for node in self.nodes:
            self._folder(node).path.mkdir(exist_ok=True)

    def _folder(self, node: int) -> RunFolder:
        return self._original.copy(node - self.first + 1)

    def plans(self, like: NodePlan) -> list[NodePlan]:
        """Return the plans of the nodes that the copies run on. A copy sends nothing, so their links are not shaped."""
        return [replace(like, name=f"node{node}", link=Link(), address="") for node in self.nodes]

    def job(
        self, node: int, address: str, argv: Sequence[str], env: Mapping[str, str]
    ) -> tuple[int, list[str], dict[str, str], Path]:
        """Fill the folder of a copy; return what `start` needs: the command with the copy's folder and address."""
        original, copy = self._original, self._folder(node)
        shutil.copyfile(original.spec, copy.spec)
        if original.own_files.is_dir():
            shutil.copytree(original.own_files, copy.own_files, dirs_exist_ok=True)
        words = [str(copy.path) if word == str(original.path) else word for word in argv]
        return node, words, {**env, "MASTER_ADDR": address, "TESTBED_ADDRESS": address}, copy.log(0)


class WithCopies:
    """The first process; it has ended when its copies have ended too, so that their records are complete."""

    def __init__(self, first: Process, copies: Sequence[Process]) -> None:
        self._first, self._copies = first, copies
        self._ended = 0.0  # monotonic time
        self.pid = first.pid

    def signal(self, signum: int) -> None:
        """Send a signal to the first one: faults are of the run, not of its copies."""
        self._first.signal(signum)

    def forbid_writing(self) -> None:
        """Let the first one's next write fail."""
        self._first.forbid_writing()

    def poll(self) -> int | None:
        """Return the first one's exit code; None while it or a copy runs, at most GRACE_S longer than the first."""
        code = self._first.poll()
        if code is None:
            return None
        self._ended = self._ended or time.monotonic()
        waits = code == 0 and time.monotonic() - self._ended < GRACE_S
        return None if waits and any(copy.poll() is None for copy in self._copies) else code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the first one."""
        return self._first.wait(timeout)
