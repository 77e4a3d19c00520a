"""The first process of a node's container: read the request, shape the network, drop privileges, execute the rank.

Rank 0 fetches a data set that is missing, with its shaping removed meanwhile. Then the routes that lead out of the
cluster's network are removed. This process runs as root with NET_ADMIN (to shape and isolate the network), SETUID,
SETGID and SETPCAP (to drop privileges) and CHOWN (to change the owner of the run folder). The rank replaces this
process. It has no capability and cannot get one.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # Interrupted.exit_code, needed before testbed is imported
SIGNALS = (signal.SIGTERM, signal.SIGINT)
if __name__ == "__main__":  # before the imports, which take some time: process 1 has no default signal handlers
    # Signals are blocked until the request is checked and the network is shaped. If one container fails there,
    # `docker compose up --exit-code-from rank0` stops all others, and each must fail with the same code.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:
        # This process has no right to signal a child of another user, but all processes of a container end with it.
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))

import json  # noqa: E402
import shlex  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from testbed.net.isolation import default_routes, isolate  # noqa: E402
from testbed.net.shaping import routes_congestion, shape, unshape  # noqa: E402
from testbed.net.tcp import check_congestion_control  # noqa: E402
from testbed.rank.request import Request, request_from_environment  # noqa: E402
from testbed.results.folder import fresh_folder, runs_dir, write_whole  # noqa: E402
from testbed.spec.datasets import data_dir, is_complete  # noqa: E402
from testbed.spec.disk import os_failure  # noqa: E402
from testbed.spec.errors import NetworkInvalid, RankFailed, TestbedError, Unavailable  # noqa: E402
from testbed.spec.privileges import NOBODY, without_privileges  # noqa: E402
from testbed.spec.resources import (  # noqa: E402
    check_memory,
    divide_cores,
    limit_of_container,
)
from testbed.spec.words import Place, set_place, shown_path  # noqa: E402

CLONE = Path("/clone/files")  # the user's clone, the folder of compose.yaml; ranks have no right to enter its parent
COMMAND_TIMEOUT_S = 20.0  # for one command, which takes milliseconds
NAME_TIMEOUT_S = 60.0  # for the container of rank 0 to start
NAME_RETRY_S = 0.2
SHAPE = (
    "the network cannot be shaped: {}. The container needs NET_ADMIN and the kernel tbf, ifb, u32 and mirred "
    "(netem for delay and loss); SHAPING=egress needs no ifb, SHAPING=off needs none of them."
)
ISOLATE = "the rank cannot be kept from other networks: {}. The container needs NET_ADMIN."


def main() -> None:
    """Check the request before anything is changed. Then shape, write spec.json, fetch data, and execute the rank."""
    request = request_from_environment(os.environ)
    check_memory(request.spec, limit_of_container())
    shaped = request.spec.world > 1 and request.shaping in ("both", "egress")
    if shaped:
        check_congestion_control(request.spec.node.congestion)
    owner = _owner(runs_dir())
    _check_owner(owner, CLONE)
    _check_writable(runs_dir(), owner)
    if shaped:
        _shape(request)  # while signals are blocked, so that every rank fails with the same code if this fails
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    argv = ["python3", "-m", "testbed.rank", "--spec", str(_write_spec(request))]
    if request.rank == 0 and (stale := stale_files(Path(__file__).resolve().parents[1], CLONE)):
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        note = f"the image is older than the code: {stale[0]}{more} changed. `make image` builds it again"
        print(note, flush=True)
        argv += ["--note", note]
    if request.rank == 0 and not is_complete(request.spec.data.name, data_dir()):
        if shaped:
            _unshape(request)
        if not _fetch_as_owner(request, owner):
            reason = f"data {request.spec.data.name} could not be fetched: synthetic images are used"
            print(reason, flush=True)
            argv += ["--synthetic", reason]
        if shaped:
            _shape(request)
    if os.environ.get("ISOLATED"):
        os.environ["MASTER_ADDR"] = _address(request.master)
        _isolate()
    if request.rank == 0 and owner == (0, 0):
        argv += ["--folder", str(_make_folder(request))]
    _pin(request)
    # Signals are blocked across the exec: process 1 would ignore a signal that arrives before its handlers are set.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    command = [*without_privileges(*(owner if owner[0] else (NOBODY, NOBODY))), *argv]
    os.execvp(command[0], command)


def _owner(folder: Path) -> tuple[int, int]:
    """Return uid and gid of the folder's owner; (0, 0) if root is the owner, for any group. Raises Unavailable."""
    try:
        status = folder.stat()
    except OSError as error:
        raise Unavailable(f"{shown_path(folder)}: {error.strerror}. compose.yaml must mount it as {folder}.") from None
    return (status.st_uid, status.st_gid) if status.st_uid else (0, 0)


def _check_owner(owner: tuple[int, int], code: Path) -> None:
    """Raise Unavailable if root owns the runs folder of another user's clone: the user would not own run folders."""
    if owner == (0, 0) and code.is_dir() and (user := _owner(code)) != (0, 0):
        rule = f"belongs to root, and the clone to uid {user[0]}: the engine made it, because it was missing"
        raise Unavailable(f"runs folder ./runs: {rule}. Change its owner: sudo chown {user[0]}:{user[1]} runs")


def stale_files(image: Path, clone: Path) -> list[str]:
    """Return the files of the image that differ from the clone's, and files that only the clone has.

    Return no file if the clone cannot be read: root has no capability here to read files that only the user may read.
    """
    whole = [path.relative_to(image) for path in (image / "testbed").iterdir() if path.is_dir()]
    made = {name for part in ("testbed", "docker") for name in _files(image, Path(part))}
    try:
        if not (clone / "testbed" / "__init__.py").is_file():
            return []  # compose.yaml was copied without the code
        there = {name for part in whole for name in _files(clone, part)}
        return sorted(str(name) for name in made | there if _content(image / name) != _content(clone / name))
    except PermissionError:
        return []


def _files(root: Path, part: Path) -> list[Path]:
    """Return the files of a folder that the build copies: no bytecode and no hidden files (.dockerignore)."""
    found = [path.relative_to(root) for path in (root / part).rglob("*") if path.is_file()]
    return [name for name in found if not any(each.startswith((".", "__pycache__")) for each in name.parts)]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _check_writable(folder: Path, owner: tuple[int, int]) -> None:
    if subprocess.run([*without_privileges(*owner), "test", "-w", folder], timeout=COMMAND_TIMEOUT_S).returncode:
        way_out = "Make ./runs writable for its owner"
        raise Unavailable(f"runs folder {shown_path(folder)}: not writable for its owner (uid {owner[0]}). {way_out}.")


def _write_spec(request: Request) -> Path:
    """Write the spec to a file and return its path. The rank reads this file instead of the environment variables."""
    path = Path(tempfile.mkdtemp(prefix="testbed-")) / "spec.json"
    path.parent.chmod(0o755)  # the rank runs as another user
    write_whole(path, request.spec.to_json())
    return path


def _fetch_as_owner(request: Request, owner: tuple[int, int]) -> bool:
    """Fetch the data set as the owner of the data folder; return False if it was not fetched."""
    name, root = request.spec.data.name, data_dir()
    if not root.is_dir():
        return False
    if _owner(root) == (0, 0) and not any(root.iterdir()):
        os.chown(root, *owner)  # the engine made the folder for the mount, as root
    argv = [*without_privileges(*_owner(root)), sys.executable, __file__, "--fetch", name]
    return subprocess.Popen(argv).wait() == 0


def _fetch(name: str) -> None:
    """Fetch a data set. This runs in a child process without privileges."""
    from testbed.data.fetch import fetch

    fetch(name, data_dir(), lambda text: print(text, flush=True))


def _address(name: str, timeout_s: float = NAME_TIMEOUT_S) -> str:
    """Return the address of a rank's container. Raises RankFailed.

    It is needed because names do not resolve after the network is isolated.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.gethostbyname(name)
        except OSError as error:  # a container has a name only while it runs
            if time.monotonic() > deadline:
                reason = f"the name {name!r} does not resolve ({error.strerror})"
                raise RankFailed(f"rank 0 has ended or was never started: {reason}. See its log") from None
        time.sleep(NAME_RETRY_S)


def _isolate() -> None:
    for command in isolate(json.loads(_apply(default_routes(), ISOLATE) or "[]")):
        _apply(command, ISOLATE)


def _pin(request: Request) -> None:
    """Set the affinity of this process, and so of the rank, to the cores that a controller would give the node."""
    spec = request.spec
    if spec.node.pinned and request.rank < spec.world:
        shares = [spec.cpus_of(rank) for rank in range(spec.world)]
        cores = divide_cores(spec.threads, shares, sorted(os.sched_getaffinity(0)))[request.rank]
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _shape(request: Request) -> None:
    for command in shape(request.link, request.interface, ingress=request.shaping == "both"):
        _apply(command)
    _set_congestion(request.spec.node.congestion, request.interface)


def _unshape(request: Request) -> None:
    """Remove the shaping, so that a download is not limited to the rate of the link."""
    for command in unshape(request.link, request.interface, ingress=request.shaping == "both"):
        _apply(command)


def _set_congestion(name: str | None, interface: str) -> None:
    """Set the congestion control on the routes, because a container cannot set every value by the sysctl."""
    routes = json.loads(_apply(["ip", "-json", "-4", "route", "show", "dev", interface, "scope", "link"]))
    for command in routes_congestion(name, routes, interface) if name else []:
        _apply(command)


def _apply(command: list[str], needs: str = SHAPE) -> str:
    """Run a command and return its stdout. Raises NetworkInvalid if it fails: `needs`, with the reason for {}."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True).stdout
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout).strip().replace("\n", " ").rstrip(".")
        reason = output or f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise NetworkInvalid(needs.format(f"{shlex.join(command)}: {reason}"))


def _make_folder(request: Request) -> Path:
    """Make the run folder as root, because the rank cannot write to ./runs; the rank's user becomes its owner."""
    folder = fresh_folder(runs_dir() / request.spec.experiment, request.spec.name)
    try:
        folder.mkdir(parents=True)
        os.chown(folder, NOBODY, NOBODY)
    except OSError as error:
        raise Unavailable(
            f"run folder {shown_path(folder)}: cannot be made ({error.strerror}). Check the owner of ./runs."
        ) from None
    return folder


if __name__ == "__main__":
    set_place(Place.COMPOSE)
    try:
        _fetch(sys.argv[2]) if sys.argv[1:2] == ["--fetch"] else main()
    except TestbedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(os_failure(error, "the container"), file=sys.stderr, flush=True)
        sys.exit(TestbedError.exit_code)
