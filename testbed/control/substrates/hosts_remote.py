"""What is asked of a host, as data: names, places and argument lists. Nothing here talks to anybody."""

from __future__ import annotations

import csv
import getpass
import io
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from testbed.control.compose_file import CPU_PERIOD
from testbed.control.substrates.engine import IMAGE
from testbed.spec.privileges import NOBODY

HOME = ".testbed"  # in the home folder of the user on the host: all our files
LABEL = "testbed=hosts"  # on all our containers there
RUN_LABEL, RANK_LABEL, PURPOSE_LABEL = "testbed.run", "testbed.rank", "testbed.purpose"
USER_LABEL = "testbed.user"  # who sent it there: an engine may serve several people
UNTOUCHED = "the interface, processor and disk of a real host are never touched"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}")
STOP_GRACE = 5  # seconds between SIGTERM and SIGKILL
MAX_PIDS = 4096
NOBODY_THERE = f"{NOBODY}:{NOBODY}"  # who runs what needs no files


@dataclass(frozen=True)
class Account:
    """Who we are on a host, and where our files lie there."""

    uid: int
    gid: int
    home: PurePosixPath

    @property
    def who(self) -> str:
        """Whom a rank runs as: the user, and nobody where that is root."""
        return f"{self.uid}:{self.gid}" if self.uid else NOBODY_THERE

    @property
    def data(self) -> PurePosixPath:
        return self.home / HOME / "data"

    @property
    def runs(self) -> PurePosixPath:
        return self.home / HOME / "runs"


ACCOUNT = ["sh", "-c", "id -u; id -g; cd && pwd -P"]


def parse_account(text: str) -> Account:
    uid, gid, home = text.splitlines()
    return Account(int(uid), int(gid), PurePosixPath(home))


def run_id(folder: Path) -> str:
    """The folder's name, made safe, and unlike any other."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", folder.name).strip("_.-")[:100] or "run"
    return f"{slug}-{secrets.token_hex(3)}"


def mount(source: PurePosixPath, target: Path | PurePosixPath, read_only: bool = False) -> list[str]:
    """`--mount` reads its value as CSV, so a path may hold commas, colons and quotes."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return ["--mount", line.getvalue()]


def user() -> str:
    """Who we are, the same for every command from this account of this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        name = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9_.@-]+", "_", f"{name}@{socket.gethostname()}")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container on a host: what runs in it, as whom, with how much."""

    name: str
    run: str
    rank: int
    who: str
    argv: Sequence[str]
    output: Path  # inside; its stdout and stderr go there
    mounts: Sequence[Sequence[str]]
    env: Mapping[str, str]
    cpus: float | None = None
    purpose: str = "rank"  # or "probe"

    def start(self) -> list[str]:
        """Without any privilege: no capability, a read-only root, and the host's network as it is."""
        limits = ["--pids-limit", str(MAX_PIDS)]
        if self.cpus is not None:
            limits += ["--cpu-period", str(CPU_PERIOD), "--cpu-quota", str(round(self.cpus * CPU_PERIOD))]
        own = {RUN_LABEL: self.run, RANK_LABEL: self.rank, PURPOSE_LABEL: self.purpose}
        marked = [*marks(), *(word for key, value in own.items() for word in ("--label", f"{key}={value}"))]
        variables = [word for key, value in self.env.items() for word in ("--env", f"{key}={value}")]
        mounts = [word for each in self.mounts for word in each]
        wrapped = ["-c", 'exec "$@" >>"$0" 2>&1', str(self.output), *self.argv]
        named = ["docker", "run", "--detach", "--name", self.name, *marked]
        return [*named, *locked(self.who), *limits, *mounts, *variables, "--entrypoint", "sh", IMAGE, *wrapped]


def locked(who: str) -> list[str]:
    """The options that leave a container nothing but the host's network."""
    taken = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"]
    return ["--network", "host", "--user", who, *taken]


def once(who: str, program: str, *argv: str) -> list[str]:
    """A program of the image that ends by itself and leaves nothing."""
    return ["docker", "run", "--rm", *marks(), *locked(who), "--entrypoint", program, IMAGE, *argv]


def marks() -> list[str]:
    """The options that make a container ours."""
    return ["--label", LABEL, "--label", f"{USER_LABEL}={user()}"]


def listing() -> list[str]:
    """Containers of the testbed on a host, whoever sent them, one JSON object a line."""
    return ["docker", "ps", "--all", "--filter", f"label={LABEL}", "--no-trunc", "--format", "{{json .}}"]


def content() -> list[str]:
    """The content hash of the image there."""
    return ["docker", "image", "inspect", "--format", '{{index .Config.Labels "testbed.content"}}', IMAGE]
