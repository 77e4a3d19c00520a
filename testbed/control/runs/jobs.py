"""Runs on Slurm whose controller has gone: find them by slurm.json in their folders, and conclude them.

The ranks need no controller: srun starts them, and they write to the shared disk. A controller that was killed leaves a
folder without summary.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.control.runs.locks import folder_lock
from testbed.control.substrates import slurm
from testbed.results.conclude import Summary, conclude_without_controller
from testbed.results.folder import RunFolder, find_runs
from testbed.results.records import Error, Step, read
from testbed.spec.errors import CommandFailed, TestbedError, UsageError


@dataclass(frozen=True)
class Unfinished:
    """A run on Slurm without a summary."""

    folder: RunFolder
    job: slurm.Job
    nodes: list[str]
    controlled: bool  # True if its controller still runs
    steps: list[int]  # done by each rank

    @property
    def ranks_run(self) -> bool:
        """True while the job has a step."""
        return self.job.state in slurm.RUNNING and bool(slurm.running_steps(self.job.id))

    @property
    def state(self) -> str:
        """Words for a table."""
        return f"job {self.job.id} {self.job.state}{', its controller runs' if self.controlled else ''}"


def find(root: Path) -> Iterator[Unfinished]:
    """Yield the unfinished runs on Slurm at or below a folder. A slurm.json that cannot be read is skipped."""
    for path in find_runs(root) if root.is_dir() else ():
        folder = RunFolder(path)
        if folder.summary.exists() or not (path / slurm.SLURM_FILE).is_file():
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            written = json.loads((path / slurm.SLURM_FILE).read_text())
            job, nodes = str(int(written["job"])), [str(name) for name in written["nodes"]]
            steps = [_steps(folder, rank) for rank in range(len(nodes))]
            yield Unfinished(folder, slurm.find_job(job), nodes, _is_locked(path), steps)


def _steps(folder: RunFolder, rank: int) -> int:
    done = 0
    with contextlib.suppress(TestbedError, OSError):
        done = sum(isinstance(record, Step) for record in read(folder.records(rank)))
    return done


def _is_locked(path: Path) -> bool:
    try:
        with folder_lock(path):
            return False
    except UsageError:
        return True


def collect(run: Unfinished) -> Summary:
    """Write the summary of a run that has ended, and end its job. Raises UsageError while it runs."""
    steps = ", ".join(f"rank {rank} at step {done}" for rank, done in enumerate(run.steps))
    with folder_lock(run.folder.path):
        if run.ranks_run or run.job.state in slurm.WAITING:
            end = f"Wait, or end it: scancel {run.job.id}"
            raise UsageError(f"{run.folder.path}: Slurm job {run.job.id} still runs ({steps}). {end}")
        spec = run.folder.read_spec()
        summary = conclude_without_controller(
            run.folder,
            spec,
            codes=[_code(run.folder, rank) for rank in range(spec.world)],
            nodes=run.nodes,
            substrate="slurm",
            note="collected after its controller was gone",
        )
    if run.job.state in slurm.RUNNING:  # it only waits for steps
        with contextlib.suppress(CommandFailed):
            slurm.ask("scancel", f"--name={slurm.JOB_NAME}", run.job.id)  # not an allocation of the user's own
    return summary


def _code(folder: RunFolder, rank: int) -> int | None:
    """The exit code that a rank has recorded; None if it recorded no error."""
    return next((record.code for record in read(folder.records(rank)) if isinstance(record, Error)), None)
