"""Sweep: run every cell of an experiment, skip finished runs, continue after failures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from testbed.control.runs.locks import Lock, folder_lock, machine_lock, set_aside_unless
from testbed.control.runs.nodes import NodesOfRuns, shared_nodes
from testbed.control.runs.progress import Progress
from testbed.control.runs.run import execute
from testbed.control.runs.select import SubstrateChoice
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.spec.disk import os_failure
from testbed.spec.errors import AllocationLost, Interrupted, TestbedError, UsageError
from testbed.spec.run import RunSpec


def folder_for(spec: RunSpec, choice: SubstrateChoice, root: Path) -> RunFolder:
    """Return runs/<experiment>/<run>, or <run>@<substrate> if that folder has a successful run of another substrate."""
    shared = RunFolder(root / spec.experiment / spec.name)
    own = RunFolder(shared.path.with_name(f"{spec.name}@{choice.name}"))
    found = _read_ok(shared)
    return own if own.path.exists() or (found and found.substrate != choice.name) else shared


def finished(folder: RunFolder, spec: RunSpec, choice: SubstrateChoice) -> Summary | None:
    """Return the summary of a successful run with exactly this spec on this substrate; else None.

    `keep_going` may differ: it changes nothing in a run whose network is as requested.
    """
    summary = _read_ok(folder)
    if summary is None or summary.substrate != choice.name:
        return None
    wanted = choice.drop_unsupported(spec).model_copy(update={"keep_going": summary.spec.keep_going})
    return summary if summary.spec == wanted else None


def _read_ok(folder: RunFolder) -> Summary | None:
    try:
        summary = Summary.read(folder) if folder.summary.is_file() else None
    except UsageError:
        return None
    return summary if summary and summary.status == "ok" else None


def run_all(
    specs: Sequence[RunSpec],
    choice: SubstrateChoice,
    root: Path,
    progress: Progress,
    fresh: bool = False,
    lock: Lock = machine_lock,
) -> tuple[list[Summary], list[TestbedError]]:
    """Run all specs. Return their summaries in the same order, and the errors of failed runs.

    The lock of each experiment is held. `fresh`: run finished cells again. Replaced folders are set aside, not deleted.
    """
    summaries: list[Summary] = []
    errors: list[TestbedError] = []
    with ExitStack() as locks:
        for experiment in sorted({spec.experiment for spec in specs}):
            locks.enter_context(folder_lock(root / experiment))
        nodes: NodesOfRuns | None = None
        for number, spec in enumerate(specs, start=1):
            progress.headline(f"[{number}/{len(specs)}] {spec.name}")
            folder = folder_for(spec, choice, root)
            if not fresh and (done := finished(folder, spec, choice)):
                progress.stage("finished earlier, skipped")
                summaries.append(done)
                continue
            if nodes is None:  # from the first run that is not skipped until the end
                nodes = locks.enter_context(shared_nodes(choice, progress.stage, lock))
            folder = folder_for(spec, choice, root)  # again: the process that held the lock may have written it
            try:
                summaries.append(_run_cell(spec, choice, folder, progress, fresh, lock, nodes))
            except (Interrupted, AllocationLost):  # without its nodes no other run can start
                raise
            except TestbedError as error:
                progress.stage(f"failed: {error}")
                errors.append(error)
                if folder.summary.is_file():
                    summaries.append(Summary.read(folder))
            except OSError as error:  # e.g. a full disk; the next run may succeed
                failure = os_failure(error, folder.path)
                progress.stage(f"failed: {failure}")
                errors.append(failure)
    return summaries, errors


def _run_cell(
    spec: RunSpec,
    choice: SubstrateChoice,
    folder: RunFolder,
    progress: Progress,
    fresh: bool,
    lock: Lock,
    nodes: NodesOfRuns,
) -> Summary:
    done = set_aside_unless(folder, lambda: None if fresh else finished(folder, spec, choice), progress.stage)
    if done is not None:
        progress.stage("finished meanwhile, skipped")
        return done
    return execute(spec, choice, folder, progress, lock=lock, nodes=nodes)
