"""Runs on hosts after their controller has gone: find, stop, collect and remove them."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from testbed.control.substrates.docker_cli import (
    CONTENT_LABEL,
    HOSTS_LABEL,
    PURPOSE_LABEL,
    RANK_LABEL,
    RUN_LABEL,
    USER_LABEL,
    exit_code,
    inspect_argv,
    list_argv,
    local_user,
    stop_argv,
)
from testbed.control.substrates.hosts.group import results_or_raise, run_on_all
from testbed.control.substrates.hosts.node import (
    HOME,
    QUERY_TIMEOUT_S,
    RUN_ID,
    Account,
    account,
    engine_version,
    remove_containers,
)
from testbed.control.substrates.hosts.ssh import Host
from testbed.control.substrates.hosts.substrate import NOTE, STOP_GRACE_S, remove_run, write_note
from testbed.results.conclude import Summary, conclude, root_cause
from testbed.results.folder import RunFolder, runs_dir
from testbed.results.receipt import Receipt
from testbed.results.records import End, Error, Step, read
from testbed.spec.errors import CommandFailed, HostFailed, TestbedError, UsageError
from testbed.spec.run import RunSpec

MAX_SPEC_BYTES = 1 << 20
REMOVE_TIMEOUT_S = 120.0
RECORDS = re.compile(r"rank(\d{1,4})\.jsonl", re.ASCII)


@dataclass
class Part:
    """One host's part of a run: its folder, its rank, and the state of its container."""

    host: Host
    run_dir: PurePosixPath
    rank: int | None = None
    state: str = "no container"  # running, paused, exited, ...
    code: int | None = None  # of a container that has ended
    step: int = -1
    purpose: str = ""  # of the container: rank or probe

    @property
    def running(self) -> bool:
        return self.state in ("running", "paused", "restarting")


@dataclass
class Found:
    """A run that was found on hosts."""

    id: str
    parts: list[Part] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return any(part.running for part in self.parts)


# --- find ---


def check_name(run: str | None) -> None:
    """Raise UsageError if `run` cannot be the name of a run."""
    if run is not None and not RUN_ID.fullmatch(run):
        raise UsageError(f"--run {run!r}: not the name of a run. `fab status` lists them.")


def find(hosts: Sequence[Host], only: str | None = None) -> tuple[list[Found], list[TestbedError]]:
    """Return our runs on these hosts, sorted by name, and the errors of hosts that could not be asked."""
    check_name(only)
    found: dict[str, Found] = {}
    outcomes = run_on_all(hosts, _parts_on)
    for parts in (outcome.value or {} for outcome in outcomes):
        for run, part in parts.items():
            if only in (None, run):
                found.setdefault(run, Found(run)).parts.append(part)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if only is not None and not found:
        errors.append(UsageError(f"--run {only}: not on these hosts. `fab status` lists what is."))
    return [found[run] for run in sorted(found)], errors


def _parts_on(host: Host) -> dict[str, Part]:
    """Our runs on one host, by folder and by container: either may exist without the other."""
    engine_version(host)
    who = account(host)
    list_folders = ["find", str(who.runs), "-mindepth", "1", "-maxdepth", "1", "-type", "d", "-printf", "%f\\n"]
    names: list[str] = []
    with contextlib.suppress(CommandFailed):  # there is no such folder, so there is no run
        names = host.run(list_folders, QUERY_TIMEOUT_S).splitlines()
    parts = {name: Part(host, who.runs / name) for name in names if RUN_ID.fullmatch(name)}
    for container, labels in _containers(host):
        run = labels.get(RUN_LABEL, "")
        if not RUN_ID.fullmatch(run):
            continue
        if labels.get(USER_LABEL) != local_user():
            parts.pop(run, None)
        elif run not in parts or parts[run].purpose != "rank":  # the newest comes first; a rank says more than a probe
            part = parts.setdefault(run, Part(host, who.runs / run))
            _read_container(part, container, int(labels[RANK_LABEL]), labels.get(PURPOSE_LABEL, ""))
    for part in parts.values():
        _read_files(part)
    return parts


def _containers(host: Host) -> list[tuple[str, dict[str, str]]]:
    """Id and labels of all testbed containers of all users, newest first."""
    lines = host.run(list_argv(HOSTS_LABEL, columns="{{json .}}"), QUERY_TIMEOUT_S).splitlines()
    listed = [json.loads(line) for line in lines]
    return [(row["ID"], dict(pair.partition("=")[::2] for pair in row["Labels"].split(","))) for row in listed]


def _read_container(part: Part, container: str, rank: int, purpose: str) -> None:
    if purpose != "rank" and part.rank is not None:
        return
    state, code = part.host.run(
        inspect_argv(container, "{{.State.Status}} {{.State.ExitCode}}"), QUERY_TIMEOUT_S
    ).split()
    part.rank, part.purpose, part.state = rank, purpose, state
    part.code = exit_code(int(code)) if state in ("exited", "dead") else None


def _read_files(part: Part) -> None:
    """Take the rank from the names of files if there is no container, and the last step from the records."""
    with contextlib.suppress(CommandFailed, ValueError, KeyError):
        if part.rank is None:
            listed = part.host.run(["ls", str(part.run_dir)], QUERY_TIMEOUT_S).splitlines()
            part.rank = next((int(match[1]) for match in map(RECORDS.fullmatch, listed) if match), None)
        if part.rank is not None:
            records = str(part.run_dir / f"rank{part.rank}.jsonl")
            last = part.host.run(["tail", "-n", "20", records], QUERY_TIMEOUT_S)
            steps = [json.loads(line)["step"] for line in last.splitlines() if '"kind":"step"' in line]
            part.step = steps[-1] if steps else -1


def last_lines(part: Part, lines: int) -> str:
    """The end of a rank's log."""
    try:
        log = str(part.run_dir / f"rank{part.rank}.log")
        return part.host.run(["tail", "-n", str(lines), log], QUERY_TIMEOUT_S)
    except CommandFailed:
        return ""


# --- stop ---


def stop(found: Found) -> None:
    """Stop its containers: SIGTERM first, then SIGKILL. Files stay."""

    def end(host: Host) -> None:
        names = host.run(list_argv(f"{RUN_LABEL}={found.id}", running=True), QUERY_TIMEOUT_S).split()
        if names:
            host.run(stop_argv(names, STOP_GRACE_S), QUERY_TIMEOUT_S + STOP_GRACE_S)

    results_or_raise(run_on_all([part.host for part in found.parts], end))


# --- collect ---


def collect(found: Found) -> tuple[Summary, Path, list[TestbedError]]:
    """Copy a run's files here, write its summary, and remove it from the hosts whose files were copied.

    A run that still runs is refused with UsageError. If files are missing the run counts as failed, until another
    `collect` copies them.
    """
    if found.running:
        steps = ", ".join(f"rank {part.rank} at step {part.step + 1}" for part in found.parts)
        raise UsageError(f"run {found.id} still runs ({steps}). Wait, or end it: fab stop --run {found.id}")
    spec = _read_spec(found)
    folder = _find_folder(found, spec)
    parts = {part.host: part for part in found.parts}
    copied = run_on_all(list(parts), lambda host: _copy_files(parts[host], folder))
    complete = [outcome.host for outcome in copied if outcome.error is None]
    summary = _conclude(found, spec, folder)
    removed = run_on_all(complete, lambda host: remove_run(host, found.id, parts[host].run_dir))
    return summary, folder.path, [outcome.error for outcome in [*copied, *removed] if outcome.error is not None]


def _read_spec(found: Found) -> RunSpec:
    """From the first host that has it; all got the same."""
    for part in found.parts:
        path = part.run_dir / "spec.json"
        with contextlib.suppress(CommandFailed):
            text = part.host.run(["head", "--bytes", str(MAX_SPEC_BYTES), str(path)], QUERY_TIMEOUT_S)
            return RunSpec.from_json(text, f"{part.host}:{path}")
    raise UsageError(f"run {found.id}: no host has its spec.json. Remove the run: fab clean --all")


def _find_folder(found: Found, spec: RunSpec) -> RunFolder:
    """The folder where the run began, if that was here; else a new one. No path is taken from a host's answer."""
    for note in runs_dir().glob(f"*/*/{NOTE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(note.read_text())["id"] == found.id:
                return RunFolder(note.parent)
    folder = RunFolder(runs_dir() / spec.experiment / found.id)
    folder.create(spec)
    write_note(folder.path, found.id, [part.host for part in found.parts])  # for another `collect`
    return folder


def _copy_files(part: Part, folder: RunFolder) -> None:
    """Copy records and log; each file is renamed to its name when it is complete."""
    if part.rank is None:
        return
    with contextlib.closing(part.host.files()) as session, tempfile.TemporaryDirectory(dir=folder.path) as scratch:
        for target in (folder.records(part.rank), folder.log(part.rank)):
            with contextlib.suppress(FileNotFoundError):
                session.get(str(part.run_dir / target.name), str(Path(scratch) / target.name))
                (Path(scratch) / target.name).replace(target)


def _conclude(found: Found, spec: RunSpec, folder: RunFolder) -> Summary:
    records = [list(read(folder.records(rank))) for rank in range(spec.world)]
    of_rank = {part.rank: part for part in found.parts}
    codes = [of_rank[rank].code if rank in of_rank else None for rank in range(spec.world)]
    reasons = []
    if any(codes):
        cause = root_cause(
            codes,
            [next((vars(r) for r in reversed(lines) if isinstance(r, Error)), None) for lines in records],
            last_steps=[max((r.step for r in lines if isinstance(r, Step)), default=-1) for lines in records],
            nodes=[str(of_rank[rank].host) if rank in of_rank else f"node{rank}" for rank in range(spec.world)],
            folder=folder,
        )
        reasons.append(str(cause))
    unfinished = [rank for rank, lines in enumerate(records) if not any(isinstance(r, End) for r in lines)]
    reasons += [f"rank {rank} did not finish, or its records are not here" for rank in unfinished]
    return conclude(
        folder,
        spec,
        status="failed" if reasons else "ok",
        reason="; ".join(reasons),
        substrate="hosts",
        notes=["collected after the connection was lost"],
        network=Receipt.read(folder.receipt).sentence() if folder.receipt.exists() else "not measured",
    )


# --- clean ---


def clean(host: Host, everything: bool) -> list[str]:
    """Remove all that is ours from a host and return what was removed.

    Raise HostFailed if a run was not collected yet, unless `everything`. The image stays if others use it.
    """
    engine_version(host)
    who = account(host)
    parts = _parts_on(host)
    if parts and not everything:
        running = [name for name, part in parts.items() if part.running]
        problem = f"run {running[0]} still runs" if running else f"run {next(iter(parts))} was not collected"
        raise HostFailed(f"{host}: {problem}. fab collect copies it here, fab clean --all removes it")
    removed = []
    count = remove_containers(host, f"{USER_LABEL}={local_user()}")
    if count:
        removed.append(f"{count} containers")
    shared = bool(_containers(host))  # of other users, who need the image
    if not shared:
        removed += _remove_images(host)
    removed += _remove_files(host, who, parts)
    if shared:
        removed.append("not the image, which others use")
    return removed


def _remove_images(host: Host) -> list[str]:
    argv = ["docker", "image", "ls", "--all", "--no-trunc", "--quiet", "--filter", f"label={CONTENT_LABEL}"]
    images = list(dict.fromkeys(host.run(argv, QUERY_TIMEOUT_S).split()))
    if not images:
        return []
    host.run(["docker", "image", "rm", "--force", *images], REMOVE_TIMEOUT_S)
    return [f"{len(images)} images"]


def _remove_files(host: Host, who: Account, parts: Mapping[str, Part]) -> list[str]:
    """Remove our folder; if another person with the same account has runs there, only our own runs."""
    home = who.home / HOME
    list_runs = ["find", str(home), "-path", f"{who.runs}/*", "-prune", "-printf", "%f\\n"]
    try:
        names = host.run(list_runs, QUERY_TIMEOUT_S).split()
    except CommandFailed:  # there is no such folder
        return []
    if {name for name in names if RUN_ID.fullmatch(name)} - set(parts):
        for part in parts.values():
            host.run(["rm", "-rf", str(part.run_dir)], REMOVE_TIMEOUT_S)
        return [f"{len(parts)} runs"] if parts else []
    host.run(["rm", "-rf", str(home)], REMOVE_TIMEOUT_S)
    return [f"~/{HOME}"]
