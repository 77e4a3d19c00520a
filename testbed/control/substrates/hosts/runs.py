"""Find, stop, collect and remove runs on hosts whose controller has ended."""

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
from testbed.control.substrates.hosts.node import (
    HOME,
    QUERY_TIMEOUT_S,
    RUN_ID,
    Account,
    account,
    engine_version,
    remove_containers,
)
from testbed.control.substrates.hosts.ssh import Host, results_or_raise, run_on_all
from testbed.control.substrates.hosts.substrate import HOSTS_FILE, STOP_GRACE_S, remove_run, write_hosts_file
from testbed.results.conclude import Summary, conclude_without_controller
from testbed.results.folder import RunFolder, runs_dir
from testbed.spec.errors import CommandFailed, HostFailed, TestbedError, UsageError
from testbed.spec.run import RunSpec

MAX_SPEC_BYTES = 1 << 20
REMOVE_TIMEOUT_S = 120.0
RECORDS = re.compile(r"rank(\d{1,4})\.jsonl", re.ASCII)


@dataclass
class RankOnHost:
    """What one host has of a run: a folder, a rank, and the state of the rank's container."""

    host: Host
    run_dir: PurePosixPath
    rank: int | None = None
    state: str = "no container"  # running, paused, exited, ...
    code: int | None = None  # exit code of a container that has ended
    step: int = -1  # the last step in the records; -1: none
    purpose: str = ""  # of the container: rank or probe

    @property
    def running(self) -> bool:
        return self.state in ("running", "paused", "restarting")


@dataclass
class RunOnHosts:
    """A run that was found on hosts."""

    id: str
    ranks: list[RankOnHost] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return any(on_host.running for on_host in self.ranks)


# Find


def check_name(run: str | None) -> None:
    """Raise UsageError if `run` cannot be the name of a run."""
    if run is not None and not RUN_ID.fullmatch(run):
        raise UsageError(f"--run {run!r}: not the name of a run. `fab status` lists them.")


def find(hosts: Sequence[Host], only: str | None = None) -> tuple[list[RunOnHosts], list[TestbedError]]:
    """Return our runs on these hosts, sorted by name, and the errors of hosts that did not answer."""
    check_name(only)
    found: dict[str, RunOnHosts] = {}
    outcomes = run_on_all(hosts, _ranks_on)
    for ranks in (outcome.value or {} for outcome in outcomes):
        for run, on_host in ranks.items():
            if only in (None, run):
                found.setdefault(run, RunOnHosts(run)).ranks.append(on_host)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if only is not None and not found:
        errors.append(UsageError(f"--run {only}: not on these hosts. `fab status` lists the runs."))
    return [found[run] for run in sorted(found)], errors


def _ranks_on(host: Host) -> dict[str, RankOnHost]:
    """Return our runs on one host. They are found by folder and by container, because either may be missing."""
    engine_version(host)
    user = account(host)
    list_folders = ["find", str(user.runs), "-mindepth", "1", "-maxdepth", "1", "-type", "d", "-printf", "%f\\n"]
    names: list[str] = []
    with contextlib.suppress(CommandFailed):  # there is no such folder, so there is no run
        names = host.run(list_folders, QUERY_TIMEOUT_S).splitlines()
    ranks = {name: RankOnHost(host, user.runs / name) for name in names if RUN_ID.fullmatch(name)}
    for container, labels in _containers(host):
        run = labels.get(RUN_LABEL, "")
        if not RUN_ID.fullmatch(run):
            continue
        if labels.get(USER_LABEL) != local_user():
            ranks.pop(run, None)
        # Newer containers come first, so the first one is kept; only a rank replaces a probe.
        elif run not in ranks or ranks[run].purpose != "rank":
            on_host = ranks.setdefault(run, RankOnHost(host, user.runs / run))
            _read_container(on_host, container, int(labels[RANK_LABEL]), labels.get(PURPOSE_LABEL, ""))
    for on_host in ranks.values():
        _read_files(on_host)
    return ranks


def _containers(host: Host) -> list[tuple[str, dict[str, str]]]:
    """Return id and labels of all testbed containers of all users, newest first."""
    lines = host.run(list_argv(HOSTS_LABEL, columns="{{json .}}"), QUERY_TIMEOUT_S).splitlines()
    listed = [json.loads(line) for line in lines]
    return [(row["ID"], dict(pair.partition("=")[::2] for pair in row["Labels"].split(","))) for row in listed]


def _read_container(on_host: RankOnHost, container: str, rank: int, purpose: str) -> None:
    if purpose != "rank" and on_host.rank is not None:
        return
    state, code = on_host.host.run(
        inspect_argv(container, "{{.State.Status}} {{.State.ExitCode}}"), QUERY_TIMEOUT_S
    ).split()
    on_host.rank, on_host.purpose, on_host.state = rank, purpose, state
    on_host.code = exit_code(int(code)) if state in ("exited", "dead") else None


def _read_files(on_host: RankOnHost) -> None:
    """Set the last step from the records and, if there is no container, the rank from the names of files."""
    with contextlib.suppress(CommandFailed, ValueError, KeyError):
        if on_host.rank is None:
            listed = on_host.host.run(["ls", str(on_host.run_dir)], QUERY_TIMEOUT_S).splitlines()
            on_host.rank = next((int(match[1]) for match in map(RECORDS.fullmatch, listed) if match), None)
        if on_host.rank is not None:
            records = str(on_host.run_dir / f"rank{on_host.rank}.jsonl")
            last = on_host.host.run(["tail", "-n", "20", records], QUERY_TIMEOUT_S)
            steps = [json.loads(line)["step"] for line in last.splitlines() if '"kind":"step"' in line]
            on_host.step = steps[-1] if steps else -1


def last_lines(on_host: RankOnHost, lines: int) -> str:
    """Return the last lines of a rank's log; "" if it has no log."""
    try:
        log = str(on_host.run_dir / f"rank{on_host.rank}.log")
        return on_host.host.run(["tail", "-n", str(lines), log], QUERY_TIMEOUT_S)
    except CommandFailed:
        return ""


# Stop


def stop(found: RunOnHosts) -> None:
    """Stop the containers of a run: SIGTERM first, then SIGKILL. Files stay."""

    def end(host: Host) -> None:
        names = host.run(list_argv(f"{RUN_LABEL}={found.id}", running=True), QUERY_TIMEOUT_S).split()
        if names:
            host.run(stop_argv(names, STOP_GRACE_S), QUERY_TIMEOUT_S + STOP_GRACE_S)

    results_or_raise(run_on_all([on_host.host for on_host in found.ranks], end))


# Collect


def collect(found: RunOnHosts) -> tuple[Summary, Path, list[TestbedError]]:
    """Copy a run's files here, write its summary, and remove the run from hosts whose files were copied.

    Return the summary, the run folder and the errors of hosts. Raises UsageError if the run still runs. If files are
    missing, the run counts as failed until another `collect` copies these files.
    """
    if found.running:
        steps = ", ".join(f"rank {on_host.rank} at step {on_host.step + 1}" for on_host in found.ranks)
        raise UsageError(f"run {found.id} still runs ({steps}). Wait, or end it: fab stop --run {found.id}")
    spec = _read_spec(found)
    folder = _find_folder(found, spec)
    ranks = {on_host.host: on_host for on_host in found.ranks}
    copied = run_on_all(list(ranks), lambda host: _copy_files(ranks[host], folder))
    complete = [outcome.host for outcome in copied if outcome.error is None]
    summary = _conclude(found, spec, folder)
    removed = run_on_all(complete, lambda host: remove_run(host, found.id, ranks[host].run_dir))
    return summary, folder.path, [outcome.error for outcome in [*copied, *removed] if outcome.error is not None]


def _read_spec(found: RunOnHosts) -> RunSpec:
    """Return the spec from the first host that has the file; it is equal on all hosts. Raises UsageError."""
    for on_host in found.ranks:
        path = on_host.run_dir / "spec.json"
        with contextlib.suppress(CommandFailed):
            text = on_host.host.run(["head", "--bytes", str(MAX_SPEC_BYTES), str(path)], QUERY_TIMEOUT_S)
            return RunSpec.from_json(text, f"{on_host.host}:{path}")
    raise UsageError(f"run {found.id}: no host has its spec.json. Remove the run: fab clean --all")


def _find_folder(found: RunOnHosts, spec: RunSpec) -> RunFolder:
    """Return the run's folder if the run began on this machine, else a new one. Paths from hosts are not trusted."""
    for file in runs_dir().glob(f"*/*/{HOSTS_FILE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(file.read_text())["id"] == found.id:
                return RunFolder(file.parent)
    folder = RunFolder(runs_dir() / spec.experiment / found.id)
    folder.create(spec)
    write_hosts_file(folder.path, found.id, [on_host.host for on_host in found.ranks])  # another `collect` reads it
    return folder


def _copy_files(on_host: RankOnHost, folder: RunFolder) -> None:
    """Copy records and log of a rank. A file gets its name when it is complete."""
    if on_host.rank is None:
        return
    with contextlib.closing(on_host.host.files()) as session, tempfile.TemporaryDirectory(dir=folder.path) as scratch:
        for target in (folder.records(on_host.rank), folder.log(on_host.rank)):
            with contextlib.suppress(FileNotFoundError):
                session.get(str(on_host.run_dir / target.name), str(Path(scratch) / target.name))
                (Path(scratch) / target.name).replace(target)


def _conclude(found: RunOnHosts, spec: RunSpec, folder: RunFolder) -> Summary:
    of_rank = {on_host.rank: on_host for on_host in found.ranks}
    return conclude_without_controller(
        folder,
        spec,
        codes=[of_rank[rank].code if rank in of_rank else None for rank in range(spec.world)],
        nodes=[str(of_rank[rank].host) if rank in of_rank else f"node{rank}" for rank in range(spec.world)],
        substrate="hosts",
        note="collected after the connection was lost",
    )


# Clean


def clean(host: Host, everything: bool) -> list[str]:
    """Remove the user's containers, images and files of the testbed from a host; return what was removed.

    The images stay if another user has containers. Raises HostFailed if a run is not collected, unless `everything`.
    """
    engine_version(host)
    user = account(host)
    ranks = _ranks_on(host)
    if ranks and not everything:
        running = [name for name, on_host in ranks.items() if on_host.running]
        problem = f"run {running[0]} still runs" if running else f"run {next(iter(ranks))} was not collected"
        raise HostFailed(f"{host}: {problem}. fab collect copies it here, fab clean --all removes it")
    removed = []
    count = remove_containers(host, f"{USER_LABEL}={local_user()}")
    if count:
        removed.append(f"{count} containers")
    shared = bool(_containers(host))  # those that are left belong to other users, who need the image
    if not shared:
        removed += _remove_images(host)
    removed += _remove_files(host, user, ranks)
    if shared:
        removed.append("not the image, which other users need")
    return removed


def _remove_images(host: Host) -> list[str]:
    argv = ["docker", "image", "ls", "--all", "--no-trunc", "--quiet", "--filter", f"label={CONTENT_LABEL}"]
    images = list(dict.fromkeys(host.run(argv, QUERY_TIMEOUT_S).split()))
    if not images:
        return []
    host.run(["docker", "image", "rm", "--force", *images], REMOVE_TIMEOUT_S)
    return [f"{len(images)} images"]


def _remove_files(host: Host, user: Account, ranks: Mapping[str, RankOnHost]) -> list[str]:
    """Remove our folder. If another person with the same account has runs in it, remove only our own runs."""
    home = user.home / HOME
    list_runs = ["find", str(home), "-path", f"{user.runs}/*", "-prune", "-printf", "%f\\n"]
    try:
        names = host.run(list_runs, QUERY_TIMEOUT_S).split()
    except CommandFailed:  # there is no such folder
        return []
    if {name for name in names if RUN_ID.fullmatch(name)} - set(ranks):
        for on_host in ranks.values():
            host.run(["rm", "-rf", str(on_host.run_dir)], REMOVE_TIMEOUT_S)
        return [f"{len(ranks)} runs"] if ranks else []
    host.run(["rm", "-rf", str(home)], REMOVE_TIMEOUT_S)
    return [f"~/{HOME}"]
