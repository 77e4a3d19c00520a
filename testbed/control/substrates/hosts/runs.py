"""Runs that lie on hosts: found again after a lost connection, stopped, brought home, removed."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from testbed.control.substrates.hosts.group import each, values
from testbed.control.substrates.hosts.node import (
    HOME,
    PURPOSE_LABEL,
    RANK_LABEL,
    RUN_ID,
    RUN_LABEL,
    SOON,
    STOP_GRACE,
    USER_LABEL,
    Account,
    account,
    containers,
    engine,
    listing,
    remove_containers,
    user,
)
from testbed.control.substrates.hosts.ssh import Host
from testbed.control.substrates.hosts.substrate import NOTE, remove_run, write_note
from testbed.results.conclude import Summary, conclude, root_cause
from testbed.results.folder import RunFolder, runs_dir
from testbed.results.receipt import Receipt
from testbed.results.records import End, Error, Step, read
from testbed.spec.errors import CommandFailed, HostFailed, TestbedError, UsageError
from testbed.spec.run import RunSpec

LARGEST = 1 << 20  # bytes of a spec.json
RECORDS = re.compile(r"rank(\d{1,4})\.jsonl", re.ASCII)


@dataclass
class Part:
    """One host's part of a run: its rank, its container and how that is."""

    host: Host
    place: PurePosixPath
    rank: int | None = None
    state: str = "no container"  # running, paused, exited, ...
    code: int | None = None  # of one that has ended
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


def find(hosts: Sequence[Host], only: str | None = None) -> tuple[list[Found], list[TestbedError]]:
    """All runs of ours on these hosts, oldest name first; a host that cannot say is a trouble, and stops no other."""
    check_name(only)
    found: dict[str, Found] = {}
    outcomes = each(hosts, _parts)
    for parts in (outcome.value or {} for outcome in outcomes):
        for run, part in parts.items():
            if only in (None, run):
                found.setdefault(run, Found(run)).parts.append(part)
    troubles = [outcome.error for outcome in outcomes if outcome.error is not None]
    if only is not None and not found:
        troubles.append(UsageError(f"--run {only}: not on these hosts. `fab status` lists what is."))
    return [found[run] for run in sorted(found)], troubles


def check_name(run: str | None) -> None:
    if run is not None and not RUN_ID.fullmatch(run):
        raise UsageError(f"--run {run!r}: no name of a run. `fab status` lists them.")


def _parts(host: Host) -> dict[str, Part]:
    """By folders and by containers: either may be there without the other. What somebody else started is left out."""
    engine(host)
    who = account(host)
    folders = ["find", str(who.runs), "-mindepth", "1", "-maxdepth", "1", "-type", "d", "-printf", "%f\\n"]
    names: list[str] = []
    with contextlib.suppress(CommandFailed):  # no such folder: no run
        names = host.run(folders, SOON).splitlines()
    parts = {name: Part(host, who.runs / name) for name in names if RUN_ID.fullmatch(name)}
    for container, labels in _containers(host):
        run = labels.get(RUN_LABEL, "")
        if not RUN_ID.fullmatch(run):
            continue
        if labels.get(USER_LABEL) != user():
            parts.pop(run, None)
        elif run not in parts or parts[run].purpose != "rank":  # the newest comes first, and a probe tells least
            part = parts.setdefault(run, Part(host, who.runs / run))
            _describe(part, container, int(labels[RANK_LABEL]), labels.get(PURPOSE_LABEL, ""))
    for part in parts.values():
        _look(part)
    return parts


def _containers(host: Host) -> list[tuple[str, dict[str, str]]]:
    """Id and labels of all, newest first."""
    listed = [json.loads(line) for line in host.run(listing(), SOON).splitlines()]
    return [(each["ID"], dict(pair.partition("=")[::2] for pair in each["Labels"].split(","))) for each in listed]


def _describe(part: Part, container: str, rank: int, purpose: str) -> None:
    if purpose != "rank" and part.rank is not None:
        return
    said = part.host.run(["docker", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", container], SOON)
    state, code = said.split()
    part.rank, part.purpose, part.state = rank, purpose, state
    part.code = int(code) if state in ("exited", "dead") else None


def _look(part: Part) -> None:
    """What its files tell: the rank, where no container is left to say so, and how far it came."""
    with contextlib.suppress(CommandFailed, ValueError, KeyError):
        if part.rank is None:
            listed = part.host.run(["ls", str(part.place)], SOON).splitlines()
            part.rank = next((int(found[1]) for found in map(RECORDS.fullmatch, listed) if found), None)
        if part.rank is not None:
            last = part.host.run(["tail", "-n", "20", str(part.place / f"rank{part.rank}.jsonl")], SOON)
            steps = [json.loads(line)["step"] for line in last.splitlines() if '"kind":"step"' in line]
            part.step = steps[-1] if steps else -1


def stop(found: Found) -> None:
    """End its containers, first politely; files stay."""

    def end(host: Host) -> None:
        names = containers(host, f"{RUN_LABEL}={found.id}", running=True)
        if names:
            host.run(["docker", "stop", "--time", str(STOP_GRACE), *names], SOON + STOP_GRACE)

    values(each([part.host for part in found.parts], end))


def last_lines(part: Part, lines: int) -> str:
    """The end of a rank's log."""
    try:
        return part.host.run(["tail", "-n", str(lines), str(part.place / f"rank{part.rank}.log")], SOON)
    except CommandFailed:
        return ""


def collect(found: Found) -> tuple[Summary, Path, list[TestbedError]]:
    """Copy what is there home, sum up, and remove from the hosts what came; a run that still goes on is refused.

    What is missing makes the run a failed one until another `collect` brings it.
    """
    if found.running:
        steps = ", ".join(f"rank {p.rank} at step {p.step + 1}" for p in found.parts)
        raise UsageError(f"run {found.id} still goes on ({steps}). Wait, or end it: fab stop --run {found.id}")
    spec = _spec(found)
    folder = _folder(found, spec)
    brought = each([part.host for part in found.parts], lambda host: _bring(_of(found, host), folder))
    came = [outcome.host for outcome in brought if outcome.error is None]
    summary = _conclude(found, spec, folder)
    removed = each(came, lambda host: remove_run(host, found.id, _of(found, host).place))
    return summary, folder.path, [outcome.error for outcome in [*brought, *removed] if outcome.error is not None]


def _of(found: Found, host: Host) -> Part:
    return next(part for part in found.parts if part.host is host)


def _spec(found: Found) -> RunSpec:
    """All hosts were told the same; one may have lost it."""
    for part in found.parts:
        where = part.place / "spec.json"
        with contextlib.suppress(CommandFailed):
            text = part.host.run(["head", "--bytes", str(LARGEST), str(where)], SOON)
            return RunSpec.from_json(text, f"{part.host}:{where}")
    raise UsageError(f"run {found.id}: no host has its spec.json. Throw it away: fab clean --all")


def _folder(found: Found, spec: RunSpec) -> RunFolder:
    """Where the run began, if that was here; else a new one. What a host says never becomes a path."""
    for note in runs_dir().glob(f"*/*/{NOTE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(note.read_text())["id"] == found.id:
                return RunFolder(note.parent)
    folder = RunFolder(runs_dir() / spec.experiment / found.id)
    folder.create(spec)
    write_note(folder.path, found.id, [part.host for part in found.parts])  # a second try finds this one
    return folder


def _bring(part: Part, folder: RunFolder) -> None:
    """Whole files, each under its name in one rename."""
    if part.rank is None:
        return
    with contextlib.closing(part.host.files()) as session, tempfile.TemporaryDirectory(dir=folder.path) as scratch:
        for target in (folder.records(part.rank), folder.log(part.rank)):
            with contextlib.suppress(FileNotFoundError):
                session.get(str(part.place / target.name), str(Path(scratch) / target.name))
                (Path(scratch) / target.name).replace(target)


def _conclude(found: Found, spec: RunSpec, folder: RunFolder) -> Summary:
    records = [list(read(folder.records(rank))) for rank in range(spec.world)]
    of_rank = {part.rank: part for part in found.parts}
    codes = [of_rank[rank].code if rank in of_rank else None for rank in range(spec.world)]
    reasons = []
    if any(codes):
        cause = root_cause(
            [128 - code if code and code > 128 else code for code in codes],  # the engine says 137 for signal 9
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


def clean(host: Host, everything: bool) -> list[str]:
    """Remove all of ours from a host; what was removed. Runs that are not home yet are kept unless `everything`."""
    engine(host)
    who = account(host)
    parts = _parts(host)
    if parts and not everything:
        running = [name for name, part in parts.items() if part.running]
        what = f"run {running[0]} still goes on" if running else f"run {next(iter(parts))} was not collected"
        raise HostFailed(f"{host}: {what}. fab collect brings it home, fab clean --all throws it away")
    removed = remove_containers(host, f"{USER_LABEL}={user()}")
    shared = bool(_containers(host))  # somebody else's, and they need the image
    images = [] if shared else _images(host)
    if images:
        host.run(["docker", "image", "rm", "--force", *images], 4 * SOON)
    files = _remove_files(host, who, parts)
    kept = ["not the image, which others use"] * shared
    return [f"{removed} containers"] * bool(removed) + [f"{len(images)} images"] * bool(images) + files + kept


def _images(host: Host) -> list[str]:
    argv = ["docker", "image", "ls", "--all", "--no-trunc", "--quiet", "--filter", "label=testbed.content"]
    return list(dict.fromkeys(host.run(argv, SOON).split()))


def _remove_files(host: Host, who: Account, parts: Mapping[str, Part]) -> list[str]:
    """All of them, unless a run of somebody else with the same account lies there, too."""
    home = who.home / HOME
    try:
        names = host.run(["find", str(home), "-path", f"{who.runs}/*", "-prune", "-printf", "%f\\n"], SOON).split()
    except CommandFailed:  # there is none
        return []
    if {name for name in names if RUN_ID.fullmatch(name)} - set(parts):
        for part in parts.values():
            host.run(["rm", "-rf", str(part.place)], 4 * SOON)
        return [f"{len(parts)} runs"] if parts else []
    host.run(["rm", "-rf", str(home)], 4 * SOON)
    return [f"~/{HOME}"]
