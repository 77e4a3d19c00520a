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
    job_name: str  # empty if the user made the job
    nodes: list[str]
    controlled: bool  # True if its controller still runs
    steps: list[int]  # done by each rank

    @property
    def tasks(self) -> list[str]:
        """The ids of the job's steps in which ranks run."""
        return list(slurm.running_steps(self.job.id).values()) if self.job.state in slurm.RUNNING else []

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
            job, name = str(int(written["job"])), str(written["name"])
            nodes = [str(node) for node in written["nodes"]]
            steps = [_steps(folder, rank) for rank in range(len(nodes))]
            yield Unfinished(folder, slurm.find_job(job), name, nodes, _is_locked(path), steps)


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
    """Write the summary of a run that has ended. If the testbed submitted its Slurm job, cancel the job.

    Raises UsageError while the job waits in the queue or one of its tasks runs.
    """
    steps = ", ".join(f"rank {rank} at step {done}" for rank, done in enumerate(run.steps))
    with folder_lock(run.folder.path):
        tasks = run.tasks
        if tasks or run.job.state in slurm.WAITING:
            ids = [run.job.id] if run.job_name else tasks
            way_out = f"Wait, or end it: scancel {' '.join(ids)}" if ids else "Wait"
            raise UsageError(f"{run.folder.path}: Slurm job {run.job.id} still runs ({steps}). {way_out}")
        spec = run.folder.read_spec()
        summary = conclude_without_controller(
            run.folder,
            spec,
            codes=[_code(run.folder, rank) for rank in range(spec.world)],
            nodes=run.nodes,
            substrate="slurm",
            note="collected after its controller was gone",
        )
    if run.job.state in slurm.RUNNING and run.job_name:  # it only waits for steps
        with contextlib.suppress(CommandFailed):
            slurm.ask("scancel", f"--name={run.job_name}", run.job.id)
    return summary


def _code(folder: RunFolder, rank: int) -> int | None:
    """The exit code that a rank has recorded; None if it recorded no error."""
    return next((record.code for record in read(folder.records(rank)) if isinstance(record, Error)), None)
