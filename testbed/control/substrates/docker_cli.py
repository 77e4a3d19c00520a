"""Argument lists for the `docker` command, as data. Each docstring describes what the command does when it is run.

hosts.ssh.Host.run executes them on a host of the inventory. On this machine machine.processes.run executes those that
run a process in a container; for everything else engine.py has the Docker SDK.
"""

from __future__ import annotations

import csv
import getpass
import io
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from testbed.spec.privileges import NOBODY
from testbed.spec.resources import quota_and_period
from testbed.spec.units import parse_size

IMAGE = "testbed:latest"
LABEL = "testbed"  # on every container and network of the testbed; its value is the substrate
CONTENT_LABEL = "testbed.content"  # on the image: the hash of what it is made of
OWNER_LABEL = "testbed.owner"  # on what a controller made on this engine: the mark of machine/ownership.py
PROJECT_LABEL, SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
FOLDER_LABEL = "com.docker.compose.project.working_dir"  # on containers: the folder that the project was made in
HOSTS_LABEL = f"{LABEL}=hosts"  # on every container of ours on a host
RUN_LABEL, RANK_LABEL, PURPOSE_LABEL = "testbed.run", "testbed.rank", "testbed.purpose"
USER_LABEL = "testbed.user"  # on containers on hosts: who started them, because several people may use one engine
MAX_PIDS = 4096
# In the container of a user's script: its folder, the data sets, the folder of this run.
SCRIPT_FOLDER, DATA_FOLDER, RUN_FOLDER = "/script", "/data", "/runs"
SCRIPT_BYTES = 1 << 30  # size of /tmp, and of /dev/shm, for a script on a host: its container has no memory limit
NOBODY_USER = f"{NOBODY}:{NOBODY}"


def server_version_argv() -> list[str]:
    """Print the version of the engine that answers."""
    return ["docker", "version", "--format", "{{.Server.Version}}"]


def info_argv(field: str) -> list[str]:
    """Print one field of `docker info`, e.g. NCPU."""
    return ["docker", "info", "--format", f"{{{{.{field}}}}}"]


def image_content_argv(image: str = IMAGE) -> list[str]:
    """Print the content hash that the image is labelled with."""
    return ["docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{CONTENT_LABEL}"}}}}', image]


def list_argv(*labels: str, columns: str = "{{.ID}}", running: bool = False) -> list[str]:
    """Print a line for each container with all of these labels; stopped ones too, unless `running`."""
    which = [] if running else ["--all"]
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return ["docker", "ps", *which, "--no-trunc", *filters, "--format", columns]


def inspect_argv(container: str, form: str) -> list[str]:
    """Print one container by a Go template."""
    return ["docker", "inspect", "--format", form, container]


def exec_argv(container: str, argv: Sequence[str], user: str = "0", env: Mapping[str, str] | None = None) -> list[str]:
    """Run a command in a container as `user`; the exit code is the command's."""
    return ["docker", "exec", "--user", user, *env_options(env or {}), container, *argv]


def stop_argv(containers: Sequence[str], grace_s: int) -> list[str]:
    """Send SIGTERM, and SIGKILL after `grace_s` seconds."""
    return ["docker", "stop", "--time", str(grace_s), *containers]


def remove_argv(containers: Sequence[str]) -> list[str]:
    """Remove containers, running or not, with their volumes."""
    return ["docker", "rm", "--force", "--volumes", *containers]


def prune_images_argv() -> list[str]:
    """Remove our images that have no tag any more and that no container uses."""
    return ["docker", "image", "prune", "--force", "--filter", f"label={CONTENT_LABEL}"]


def set_memory_argv(container: str, limit_bytes: int) -> list[str]:
    """Limit a container's memory, and set the same limit for memory plus swap, so that it cannot swap."""
    return ["docker", "update", "--memory", str(limit_bytes), "--memory-swap", str(limit_bytes), container]


def memory_argv(container: str) -> list[str]:
    """Print the memory that a container uses; `parse_memory` reads it."""
    return ["docker", "stats", "--no-stream", "--format", "{{.MemUsage}}", container]


def parse_memory(text: str) -> int:
    """Return the bytes in use from a line like `12.5MiB / 2GiB`."""
    return parse_size(text.split("/")[0].strip())


def env_options(env: Mapping[str, str]) -> list[str]:
    return [word for key, value in env.items() for word in ("--env", f"{key}={value}")]


def mount_option(source: PurePosixPath, target: Path | PurePosixPath, read_only: bool = False) -> list[str]:
    """Return a bind mount. Docker reads the value as CSV, so a path may contain commas, colons and quotes."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return ["--mount", line.getvalue()]


def local_user() -> str:
    """Return the value of USER_LABEL for the user of this machine: `name@machine`."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        name = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9_.@-]+", "_", f"{name}@{socket.gethostname()}")


def owner_options() -> list[str]:
    """Return the labels by which our containers on a host are found again."""
    return ["--label", HOSTS_LABEL, "--label", f"{USER_LABEL}={local_user()}"]


def unprivileged_options(user: str) -> list[str]:
    """Return options for a container with the host's network, a read-only root and no capability."""
    limits = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"]
    return ["--network", "host", "--user", user, *limits]


def docker_run_argv(user: str, program: str, *argv: str) -> list[str]:
    """Run a program of the image on a host to its end, without privileges; the container is removed."""
    options = [*owner_options(), *unprivileged_options(user), "--entrypoint", program]
    return ["docker", "run", "--rm", *options, IMAGE, *argv]


def trial_argv(image: str, script: str) -> list[str]:
    """Run a script in a container with a network of its own that it may shape."""
    options = ["--network", "none", "--cap-drop", "ALL", "--cap-add", "NET_ADMIN", "--entrypoint", "sh"]
    return ["docker", "run", "--rm", *options, image, "-c", script]


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container of a run on a host: a rank, or the probe before it."""

    name: str
    run: str
    rank: int
    user: str
    argv: Sequence[str]
    output: Path  # inside the container; stdout and stderr are appended to it
    mounts: Sequence[Sequence[str]]
    env: Mapping[str, str]
    cpus: float | None = None
    purpose: str = "rank"  # or "probe"
    image: str = IMAGE
    script: bool = False  # it runs a user's script, which needs room for its files

    def start_argv(self) -> list[str]:
        """Start it in the background, without privileges."""
        own = {RUN_LABEL: self.run, RANK_LABEL: self.rank, PURPOSE_LABEL: self.purpose}
        labels = [word for key, value in own.items() for word in ("--label", f"{key}={value}")]
        limits = ["--pids-limit", str(MAX_PIDS)]
        if self.cpus is not None:
            quota, period = quota_and_period(self.cpus)
            limits += ["--cpu-period", str(period), "--cpu-quota", str(quota)]
        if self.script:
            limits += ["--tmpfs", f"/tmp:size={SCRIPT_BYTES},mode=1777,exec", "--shm-size", str(SCRIPT_BYTES)]
        options = [*owner_options(), *labels, *unprivileged_options(self.user), *limits]
        mounts = [word for mount in self.mounts for word in mount]
        wrapped = ["-c", 'exec "$@" >>"$0" 2>&1', str(self.output), *self.argv]
        named = ["docker", "run", "--detach", "--name", self.name]
        return [*named, *options, *mounts, *env_options(self.env), "--entrypoint", "sh", self.image, *wrapped]


def exit_code(code: int) -> int:
    """Convert the exit code of a container or of `docker exec`: 128 + n, ended by signal n, becomes -n."""
    return code if code <= 128 else 128 - code
