"""The first process of a node's container: read the request, shape the network, drop every privilege, become the rank.

It runs as root with NET_ADMIN (shape), SETUID, SETGID, SETPCAP (drop) and CHOWN (give the run's folder away), and
nothing else; the rank that replaces it has no capability at all and no way to get one.
"""

from __future__ import annotations

import os
import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)
if __name__ == "__main__":  # before the imports, which take a while: process 1 has no default handlers
    for number in SIGNALS:
        # It may not kill a child of another user, but its end takes all of them along.
        signal.signal(number, lambda *_: os._exit(130))

import json  # noqa: E402
import shlex  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from testbed.net.shaping import routes_congestion, shape  # noqa: E402
from testbed.rank.asked import Asked, ask  # noqa: E402
from testbed.results.folder import fresh_folder, runs_dir  # noqa: E402
from testbed.spec.datasets import data_dir, is_complete  # noqa: E402
from testbed.spec.errors import NetworkInvalid, TestbedError, Unavailable  # noqa: E402
from testbed.spec.privileges import NOBODY, without_privileges  # noqa: E402

RANK = ["python3", "-m", "testbed.rank.standalone"]
TIMEOUT = 20.0  # seconds; each of these commands takes milliseconds


def main() -> None:
    """Everything that can be refused is refused before anything is shaped or made."""
    asked = ask(os.environ)
    owner = _owner(runs_dir())
    _check_writable(runs_dir(), owner)
    if asked.rank == 0:
        _bring_data(asked, owner)
    if asked.spec.world > 1 and asked.shaping in ("both", "egress"):
        for command in shape(asked.link, asked.interface, ingress=asked.shaping == "both"):
            _apply(command)
        _set_congestion(asked.spec.node.congestion, asked.interface)
    if asked.rank == 0 and owner == (0, 0):
        os.environ["TESTBED_RUN"] = str(_make_folder(asked))
    # Held back across the exec: as process 1, the new program would lose what arrives before it has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    command = [*without_privileges(*(owner if owner[0] else (NOBODY, NOBODY))), *RANK]
    os.execvp(command[0], command)


def _owner(folder: Path) -> tuple[int, int]:
    """uid and gid of the folder's owner; root's group counts as root only with root as the owner."""
    try:
        status = folder.stat()
    except OSError as error:
        raise Unavailable(f"{folder}: {error.strerror}. Mount a folder there for the runs.") from None
    return (status.st_uid, status.st_gid) if status.st_uid else (0, 0)


def _check_writable(folder: Path, owner: tuple[int, int]) -> None:
    if subprocess.run([*without_privileges(*owner), "test", "-w", folder], timeout=TIMEOUT).returncode:
        way_out = "Make ./runs writable for its owner"
        raise Unavailable(f"runs folder {folder}: not writable for its owner (uid {owner[0]}). {way_out}.")


def _bring_data(asked: Asked, owner: tuple[int, int]) -> None:
    """Fetch what is missing, as the data folder's owner; where that fails, train on synthetic images and say so."""
    name, root = asked.spec.data.name, data_dir()
    if is_complete(name, root):
        return
    if root.is_dir() and _owner(root) == (0, 0) and not any(root.iterdir()):
        os.chown(root, *owner)  # the engine made it for the mount, as root
    argv = [*without_privileges(*_owner(root)), sys.executable, __file__, "--fetch", name] if root.is_dir() else []
    if not argv or subprocess.Popen(argv).wait():
        os.environ["DATA"] = "synthetic"
        os.environ["TESTBED_NOTE"] = f"data {name} could not be fetched: synthetic images instead"
        print(os.environ["TESTBED_NOTE"], flush=True)


def _fetch(name: str) -> None:
    """In a process of its own, which has no privileges."""
    from testbed.data.fetch import fetch

    fetch(name, data_dir(), lambda text: print(text, flush=True))


def _set_congestion(name: str | None, interface: str) -> None:
    """Through the route: a container may set the sysctl only to what the machine allows everybody."""
    routes = json.loads(_apply(["ip", "-json", "-4", "route", "show", "dev", interface, "scope", "link"]))
    for command in routes_congestion(name, routes, interface) if name else []:
        _apply(command)


def _apply(command: list[str]) -> str:
    """stdout; any failure is the end of this container."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().replace("\n", " ").rstrip(
            "."
        ) or f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    lacks = "The container needs NET_ADMIN and the kernel tbf, ifb, u32 and mirred (netem for delay and loss)"
    way_out = "SHAPING=egress does without ifb, SHAPING=off without all of it"
    raise NetworkInvalid(f"the network cannot be shaped: {shlex.join(command)}: {reason}. {lacks}; {way_out}.")


def _make_folder(asked: Asked) -> Path:
    """Where runs/ is root's: make the run's folder and give it to the rank."""
    folder = fresh_folder(runs_dir() / asked.spec.experiment, asked.spec.name)
    try:
        folder.mkdir(parents=True)
        os.chown(folder, NOBODY, NOBODY)
    except OSError as error:
        raise Unavailable(f"run folder {folder}: cannot be made ({error.strerror}). Look who owns ./runs.") from None
    return folder


if __name__ == "__main__":
    try:
        _fetch(sys.argv[2]) if sys.argv[1:2] == ["--fetch"] else main()
    except TestbedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
