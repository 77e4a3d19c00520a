"""Sweep: run every cell of an experiment, skip what is finished, go on past what fails."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from testbed.control.cli.progress import Progress
from testbed.control.runs.locks import alone, held
from testbed.control.runs.run import execute
from testbed.control.runs.select import Place
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.spec.errors import Interrupted, TestbedError, UsageError
from testbed.spec.run import RunSpec


def folder_for(spec: RunSpec, place: Place, root: Path) -> RunFolder:
    """runs/<experiment>/<run>; what another place finished there stays, and this place's goes to <run>@<place>."""
    plain = RunFolder(root / spec.experiment / spec.name)
    own = RunFolder(plain.path.with_name(f"{spec.name}@{place.name}"))
    found = _ended_well(plain)
    return own if own.path.exists() or (found and found.substrate != place.name) else plain


def _ended_well(folder: RunFolder) -> Summary | None:
    try:
        summary = Summary.read(folder) if folder.summary.is_file() else None
    except UsageError:
        return None
    return summary if summary and summary.status == "ok" else None


def finished(folder: RunFolder, spec: RunSpec, place: Place) -> Summary | None:
    """The summary of a run that ended well, with exactly this spec, at this place."""
    summary = _ended_well(folder)
    return summary if summary and summary.spec == place.fit(spec) and summary.substrate == place.name else None


def sweep(
    specs: Sequence[RunSpec], place: Place, root: Path, progress: Progress, fresh: bool = False
) -> tuple[list[Summary], list[TestbedError]]:
    """All summaries in the order of `specs`, and the errors met on the way; one sweep at a time in each folder."""
    with ExitStack() as locks:
        for experiment in sorted({spec.experiment for spec in specs}):
            locks.enter_context(held(root / experiment))
        return _sweep(specs, place, root, progress, fresh, locks)


def _sweep(
    specs: Sequence[RunSpec], place: Place, root: Path, progress: Progress, fresh: bool, locks: ExitStack
) -> tuple[list[Summary], list[TestbedError]]:
    summaries: list[Summary] = []
    errors: list[TestbedError] = []
    for number, spec in enumerate(specs, start=1):
        folder = folder_for(spec, place, root)
        progress.headline(f"[{number}/{len(specs)}] {spec.name}")
        done = None if fresh else finished(folder, spec, place)
        if done:
            progress.stage("finished earlier, skipped")
            summaries.append(done)
            continue
        locks.enter_context(alone(place))  # from the first that must run to the end of the sweep
        folder = folder_for(spec, place, root)  # again: whoever was waited for may have finished it at another place
        try:
            summaries.append(_run_anew(spec, place, folder, progress, fresh))
        except Interrupted:
            raise
        except TestbedError as error:
            progress.stage(f"failed: {error}")
            errors.append(error)
            if folder.summary.is_file():
                summaries.append(Summary.read(folder))
        except OSError as error:  # of the machine: a full disk, a folder that vanished. The next may fare better
            progress.stage(f"failed: {error}")
            errors.append(TestbedError(f"{spec.name}: {error.strerror or error}. Nothing of it counts."))
    return summaries, errors


def _run_anew(spec: RunSpec, place: Place, folder: RunFolder, progress: Progress, fresh: bool) -> Summary:
    if folder.path.exists():
        with held(folder.path):  # nobody is at it
            if not fresh and (done := finished(folder, spec, place)):
                progress.stage("finished meanwhile, skipped")
                return done
            progress.stage(f"an earlier attempt moved to {folder.set_aside()}")
    return execute(spec, place, folder, progress)
