"""Runs that lie on hosts: found again after a lost connection, stopped, brought home, removed."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from testbed.control.substrates.hosts import NOTE, remove_run
from testbed.control.substrates.hosts_each import each, values
from testbed.control.substrates.hosts_facts import SOON, account, engine
from testbed.control.substrates.hosts_remote import HOME, LABEL, RUN_ID, STOP_GRACE, Account, listing
from testbed.control.substrates.hosts_ssh import CommandFailed, Host, HostFailed
from testbed.net.receipt import Receipt
from testbed.spec.errors import TestbedError, UsageError
from testbed.spec.folder import RunFolder, runs_dir, write_whole
from testbed.spec.run import RunSpec
from testbed.spec.summary import Summary, summarise

LARGEST = 1 << 20  # bytes of a spec.json


@dataclass
class Part:
    """One host's part of a run: its rank, its container and how that is."""

    host: Host
    place: PurePosixPath
    rank: int | None = None
    state: str = "no container"  # running, paused, exited, ...
    code: int | None = None
    step: int = -1

    @property
    def running(self) -> bool:
        return self.state in ("running", "paused", "created", "restarting")


@dataclass
class Found:
    """A run that was found on hosts."""

    id: str
    parts: list[Part] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return any(part.running for part in self.parts)


def find(hosts: Sequence[Host], only: str | None = None) -> list[Found]:
    """All runs on these hosts, oldest name first."""
    if only is not None and not RUN_ID.fullmatch(only):
        raise UsageError(f"--run {only!r}: no name of a run. `fab status` lists them.")
    found: dict[str, Found] = {}
    for parts in values(each(hosts, _parts)):
        for run, part in parts.items():
            if only in (None, run):
                found.setdefault(run, Found(run)).parts.append(part)
    if only is not None and not found:
        raise UsageError(f"--run {only}: not on these hosts. `fab status` lists what is.")
    return [found[run] for run in sorted(found)]


def _parts(host: Host) -> dict[str, Part]:
    """By folders and by containers: either may be there without the other."""
    engine(host)
    who = account(host)
    folders = ["find", str(who.runs), "-mindepth", "1", "-maxdepth", "1", "-type", "d", "-printf", "%f\\n"]
    names: list[str] = []
    with contextlib.suppress(CommandFailed):  # no such folder: no run
        names = host.run(folders, SOON).splitlines()
    parts = {name: Part(host, who.runs / name) for name in names if RUN_ID.fullmatch(name)}
    for line in host.run(listing(), SOON).splitlines():
        container = json.loads(line)
        labels = dict(pair.partition("=")[::2] for pair in container["Labels"].split(","))
        run = labels.get("testbed.run", "")
        if RUN_ID.fullmatch(run):
            part = parts.setdefault(run, Part(host, who.runs / run))
            _describe(part, container["ID"], int(labels["testbed.rank"]))
    return parts


def _describe(part: Part, container: str, rank: int) -> None:
    """The newest container comes first; those before it were of the probe."""
    if part.rank is not None:
        return
    said = part.host.run(["docker", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", container], SOON)
    state, code = said.split()
    part.rank, part.state, part.code = rank, state, None if state in ("running", "paused", "created") else int(code)
    with contextlib.suppress(CommandFailed, ValueError, KeyError):
        last = part.host.run(["tail", "-n", "20", str(part.place / f"rank{rank}.jsonl")], SOON)
        steps = [json.loads(line)["step"] for line in last.splitlines() if '"kind":"step"' in line]
        part.step = steps[-1] if steps else -1


def stop(found: Found) -> None:
    """End its containers, first politely; files stay."""

    def end(host: Host) -> None:
        names = host.run(["docker", "ps", "--quiet", "--filter", f"label=testbed.run={found.id}"], SOON).split()
        if names:
            host.run(["docker", "stop", "--time", str(STOP_GRACE), *names], SOON + STOP_GRACE)

    values(each([part.host for part in found.parts], end))


def last_lines(part: Part, lines: int) -> str:
    """The end of a rank's log."""
    try:
        return part.host.run(["tail", "-n", str(lines), str(part.place / f"rank{part.rank}.log")], SOON)
    except CommandFailed:
        return ""


def collect(found: Found) -> tuple[Summary, Path]:
    """Copy every rank's files home, sum up, and remove the run from the hosts; one that still runs is refused."""
    spec = _spec(found.parts[0])
    here = {part.rank for part in found.parts}
    missing = [f"rank {rank}" for rank in range(spec.world) if rank not in here]
    if found.running:
        steps = ", ".join(f"rank {p.rank} at step {p.step + 1}" for p in found.parts)
        raise UsageError(f"run {found.id} still goes on ({steps}). Wait, or end it: fab stop --run {found.id}")
    if missing:
        raise UsageError(f"run {found.id}: {', '.join(missing)} not found on these hosts. Are all in the inventory?")
    folder = _folder(found, spec)
    values(each([part.host for part in found.parts], lambda host: _bring(_of(found, host), folder)))
    summary = _conclude(found, spec, folder)
    values(each([part.host for part in found.parts], lambda host: remove_run(host, found.id, _of(found, host).place)))
    return summary, folder.path


def _of(found: Found, host: Host) -> Part:
    return next(part for part in found.parts if part.host is host)


def _spec(part: Part) -> RunSpec:
    where = part.place / "spec.json"
    text = part.host.run(["head", "--bytes", str(LARGEST), str(where)], SOON)
    return RunSpec.from_json(text, f"{part.host}:{where}")


def _folder(found: Found, spec: RunSpec) -> RunFolder:
    """Where the run began, if that was here; else a new one. What a host says never becomes a path."""
    for note in runs_dir().glob(f"*/*/{NOTE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(note.read_text())["id"] == found.id:
                return RunFolder(note.parent)
    folder = RunFolder(runs_dir() / spec.experiment / found.id)
    folder.create(spec)
    return folder


def _bring(part: Part, folder: RunFolder) -> None:
    """Whole files, each under its name in one rename."""
    assert part.rank is not None
    with contextlib.closing(part.host.files()) as session, tempfile.TemporaryDirectory(dir=folder.path) as scratch:
        for target in (folder.records(part.rank), folder.log(part.rank)):
            with contextlib.suppress(FileNotFoundError):
                session.get(str(part.place / target.name), str(Path(scratch) / target.name))
                (Path(scratch) / target.name).replace(target)


def _conclude(found: Found, spec: RunSpec, folder: RunFolder) -> Summary:
    bad = [f"rank {part.rank} on {part.host} ended with code {part.code}" for part in found.parts if part.code]
    facts = {"status": "failed" if bad else "ok", "reason": "; ".join(bad), "substrate": "hosts"}
    network = Receipt.read(folder.receipt).sentence() if folder.receipt.exists() else "not measured"
    notes = ["collected after the connection was lost"]
    summary = summarise(folder, spec, **facts, notes=notes, network=network)
    write_whole(folder.summary, summary.model_dump_json(by_alias=True, indent=1))
    return summary


def clean(host: Host, everything: bool) -> list[str]:
    """Remove all of ours from a host; what was removed. Runs that are not home yet are kept unless `everything`."""
    engine(host)
    who = account(host)
    parts = _parts(host)
    if parts and not everything:
        running = [name for name, part in parts.items() if part.running]
        what = f"run {running[0]} still goes on" if running else f"run {next(iter(parts))} was not collected"
        raise HostFailed(f"{host}: {what}. fab collect brings it home, fab clean --all throws it away")
    containers = host.run(["docker", "ps", "--all", "--quiet", "--filter", f"label={LABEL}"], SOON).split()
    if containers:
        host.run(["docker", "rm", "--force", "--volumes", *containers], SOON)
    images = _images(host)
    if images:
        host.run(["docker", "image", "rm", "--force", *images], 4 * SOON)
    files = _remove_files(host, who)
    return [f"{len(containers)} containers"] * bool(containers) + [f"{len(images)} images"] * bool(images) + files


def _images(host: Host) -> list[str]:
    argv = ["docker", "image", "ls", "--all", "--no-trunc", "--quiet", "--filter", "label=testbed.content"]
    return list(dict.fromkeys(host.run(argv, SOON).split()))


def _remove_files(host: Host, who: Account) -> list[str]:
    home = who.home / HOME
    try:
        host.run(["test", "-e", str(home)], SOON)
    except CommandFailed:
        return []
    host.run(["rm", "-rf", str(home)], 4 * SOON)
    return [f"~/{HOME}"]


def told(error: TestbedError | None) -> str:
    return "" if error is None else str(error)
