"""The Docker engine of this machine, through its SDK: check what it can do; list and remove our Compose projects.

Also the Compose file: compose.yaml is the rendering of docker/compose.yaml.j2 for four nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import __version__
from testbed.control.machine.processes import run
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.clone import ROOT, content_hash
from testbed.control.substrates.docker_cli import (
    CONTENT_LABEL,
    FOLDER_LABEL,
    IMAGE,
    LABEL,
    OWNER_LABEL,
    PROJECT_LABEL,
    trial_argv,
)
from testbed.control.substrates.links import trials, try_commands
from testbed.spec.errors import CommandFailed, EngineLost, TestbedError, Unavailable, refuse, require_extra
from testbed.spec.link import parse_shaping
from testbed.spec.resources import CPU_PERIOD_US, DEFAULT_LIMIT
from testbed.spec.run import SCHEMA

if TYPE_CHECKING:
    from docker import DockerClient

TEMPLATE = "compose.yaml.j2"
# The project's name in compose.yaml. Compose prints the text after `?` where PWD is not set, as in cron and systemd.
PROJECT = "testbed-${PWD:?It names the project. Use `make up`, or set PWD to the folder of compose.yaml}"
OLDEST_COMPOSE = (2, 16)  # older ones do not replace variables in `name`, so that all clones would share a project
MAX_NODES = 256
ENGINE_TIMEOUT_S = 120.0  # creating four containers takes a few seconds
SOCKET_TIMEOUT_S = 5.0
LOCAL_SCHEMES = ("", "unix", "http+unix", "npipe")  # of the address of an engine on this machine
ANSWER_TIMEOUT_S = 10.0  # an engine that takes longer is lost
RUNNING, STOPPED = "running", "stopped"  # in place of the owner, for a project that `docker compose up` made
OURS = {"label": [LABEL, PROJECT_LABEL]}  # filters of the engine's lists


def render(nodes: int = 4, folder: Path = ROOT / "docker", project: str = PROJECT, racks: Sequence[int] = ()) -> str:
    """Return the text of the Compose file for so many nodes; `racks`: the rack of each, if they have uplinks."""
    if not 1 <= nodes <= MAX_NODES:
        raise refuse("nodes", nodes, f"must be 1 to {MAX_NODES}", "Use e.g. 4.")
    require_extra("substrate compose", "compose", "jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True)
    values = {"nodes": nodes, "version": __version__, "schema": SCHEMA, "cpu_period": CPU_PERIOD_US}
    return templates.get_template(TEMPLATE).render(**values, project=project, mem_limit=DEFAULT_LIMIT, racks=racks)


def variable(name: str, root: Path = ROOT) -> str:
    """Return a variable as `docker compose up` reads it: from the environment, else from .env; empty if it is unset."""
    if name in os.environ:
        return os.environ[name]
    file = root / ".env"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    found = [line.partition("=")[2] for line in lines if line.removeprefix("export ").partition("=")[0].strip() == name]
    value = re.sub(r"(^|\s)#.*", "", found[-1]).strip() if found else ""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def image_name() -> str:
    """Return the name of the image: that of the variable IMAGE, else the usual one."""
    return variable("IMAGE") or IMAGE


def shaping() -> str:
    """Return which directions of a link are shaped, by the variable SHAPING. Raises SpecError."""
    return parse_shaping(variable("SHAPING"))


def connect(timeout_s: float = ENGINE_TIMEOUT_S) -> DockerClient:
    """Return a client of the engine that `docker` commands use; raise Unavailable if no engine answers."""
    require_extra("substrate compose", "compose", "docker")
    import docker  # here, because it is slow to import and most commands need no engine
    from docker.errors import DockerException

    try:
        check_socket(engine_url())
        return docker.from_env(timeout=timeout_s, use_ssh_client=True)  # it asks for the engine's API version
    except (DockerException, OSError) as error:
        reason = str(error).split("(", 1)[0].strip()
        way_out = "Start one; `make engine` installs it"
        raise Unavailable(f"substrate compose: no Docker engine answers ({reason}). {way_out}") from None


def engine_url() -> str:
    """Return the address of the engine that `docker` commands use: DOCKER_HOST, else that of the Docker context."""
    from docker.context import ContextAPI

    return str(os.environ.get("DOCKER_HOST") or ContextAPI.kwargs_from_context().get("base_url", ""))


def remote_engine() -> str:
    """Return the address of an engine on another machine; empty for one on this machine, and if that is not known."""
    try:
        from docker.errors import DockerException
    except ImportError:
        return ""
    with contextlib.suppress(DockerException, OSError):
        url = engine_url()
        return "" if url.partition("://")[0] in LOCAL_SCHEMES else url
    return ""


def check_socket(url: str) -> None:
    """Raise OSError if nothing listens on a `unix://` socket; the SDK would leave its own socket open."""
    kind, _, path = url.partition("://")
    if kind == "unix":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SOCKET_TIMEOUT_S)
            try:
                connection.connect(path)
            except OSError as error:
                raise OSError(f"{path}: {error.strerror or error}") from None


def answers() -> bool:
    """Return True if the engine answers."""
    try:
        connect(ANSWER_TIMEOUT_S).close()  # it asks for the engine's API version
    except Unavailable:
        return False
    return True


def check_answers() -> None:
    """Raise EngineLost if the engine does not answer any more."""
    if not answers():
        raise EngineLost("the Docker engine stopped answering")


def run_docker(argv: Sequence[str], timeout_s: float) -> str:
    """Run a `docker` command to its end and return its stdout; raise EngineLost or CommandFailed."""
    try:
        return run(argv, timeout_s)
    except CommandFailed:
        check_answers()
        raise


@contextlib.contextmanager
def wrap_docker_errors() -> Iterator[None]:
    """Raise TestbedError for what the SDK raises: a refusal of the engine; EngineLost for a lost connection."""
    from docker.errors import APIError, DockerException

    try:
        yield
    except (DockerException, OSError) as error:
        if not isinstance(error, APIError):  # which is an answer
            check_answers()
        reason = getattr(error, "explanation", None) or error
        raise TestbedError(f"the Docker engine refused: {str(reason).strip()}") from None


def engine_version() -> str:
    """Return the version of the engine that answers; raise Unavailable if none does."""
    with contextlib.closing(connect()) as client, wrap_docker_errors():
        return str(client.version()["Version"])


def compose_version() -> str:
    """Return the version of the Compose plugin; raise Unavailable if there is none, or if it is too old."""
    oldest = ".".join(map(str, OLDEST_COMPOSE))
    try:
        version = run(["docker", "compose", "version", "--short"], ENGINE_TIMEOUT_S).strip()
    except (CommandFailed, OSError):
        raise Unavailable(
            f"substrate compose: `docker compose` is missing. Install Compose {oldest} or later, or `make engine`"
        ) from None
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < OLDEST_COMPOSE:
        raise Unavailable(f"substrate compose: Compose {version} is too old. Install {oldest} or later")
    return version


def inspect_image(own: str = "") -> dict[str, Any]:
    """Return the engine's facts about our image; raise Unavailable if it is missing or made from other code.

    `own`: an image of the user's instead, which must be made from ours.
    """
    now, name = content_hash(), own or image_name()
    build = f"Build it from a Dockerfile with FROM {image_name()}, after `make image`" if own else ""
    with contextlib.closing(connect()) as client, wrap_docker_errors():
        from docker.errors import ImageNotFound

        try:
            image = client.images.get(name)
        except ImageNotFound:
            way_out = build or "Build it with `make image`"
            raise Unavailable(f"substrate compose: image {name} is missing. {way_out}") from None
    made = image.labels.get(CONTENT_LABEL, "unknown")
    if made != now:
        differs = f"was made from other code (content {made}, the code here is {now})"
        raise Unavailable(f"substrate compose: image {name} {differs}. {build or 'Build it again with `make image`'}")
    return dict(image.attrs)


def image_content() -> str:
    """Return a sentence with the content hash of an image that is up to date; raise what `inspect_image` raises."""
    return f"up to date, content {inspect_image()['Config']['Labels'][CONTENT_LABEL]}"


def check(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable if engine, Compose or image are missing, or if the engine's kernel cannot shape the links."""
    if any(plan.uplink for plan in plans) and shaping() == "egress":
        rule = "an uplink is shaped each way"
        raise Unavailable(f"substrate compose: SHAPING=egress: {rule}. Use SHAPING=both, or leave topology.uplink out")
    engine_version()
    compose_version()
    inspect_image()
    directions = shaping()
    for commands, feature in trials(plans, ingress=directions == "both") if directions != "off" else ():
        # A temporary container shapes its own loopback, because it has the engine's kernel, wherever the engine runs.
        whole = [["ip", "link", "set", "lo", "up"], *commands]
        try_commands("substrate compose: the engine's kernel", whole, feature, _run_in_container)


def _run_in_container(script: str) -> str:
    return run(trial_argv(image_name(), script), ENGINE_TIMEOUT_S)


@dataclass(frozen=True)
class Project:
    """Containers and networks of ours with one Compose project, one owner and one folder that they were made in.

    Two clones in folders of the same name share a project name, so the name alone does not tell whose they are.
    """

    name: str
    owner: str  # a mark; RUNNING or STOPPED if `docker compose up` made it
    folder: str | None = None  # None: only networks are left, and Compose does not label them with the folder

    def contains(self, labels: Mapping[str, str]) -> bool:
        """Return True for the labels of a container of this project."""
        marked = self.owner not in (RUNNING, STOPPED)
        own = (self.name, self.owner if marked else None)
        same = (labels.get(PROJECT_LABEL), labels.get(OWNER_LABEL)) == own
        return same and (marked or labels.get(FOLDER_LABEL) == self.folder)


def projects() -> list[Project]:
    """Return our Compose projects, sorted by name; without an engine an empty list."""
    try:
        client = connect()
    except Unavailable:
        return []
    found: dict[tuple[str, str | None, str | None], Project] = {}
    with contextlib.closing(client), wrap_docker_errors():
        for container in client.containers.list(all=True, filters=OURS, sparse=True):  # sparse: one request for all
            labels = container.attrs["Labels"]
            name, mark, folder = labels[PROJECT_LABEL], labels.get(OWNER_LABEL), labels.get(FOLDER_LABEL)
            key = (name, mark, None if mark else folder)
            runs = container.status in ("running", "paused") or (key in found and found[key].owner == RUNNING)
            found[key] = Project(name, mark or (RUNNING if runs else STOPPED), folder)
        for network in client.networks.list(filters=OURS):
            labels = network.attrs["Labels"]
            name, mark = labels[PROJECT_LABEL], labels.get(OWNER_LABEL)
            if not any(key[:2] == (name, mark) for key in found):
                found[name, mark, None] = Project(name, mark or STOPPED)
    return sorted(found.values(), key=lambda project: (project.name, project.folder or ""))


def remove_project(project: Project) -> None:
    """Remove the containers of a project, and its networks if no other container has that project name.

    What is gone already is ignored.
    """
    with contextlib.closing(connect()) as client, wrap_docker_errors():
        from docker.errors import NotFound

        named = {"label": f"{PROJECT_LABEL}={project.name}"}
        containers = client.containers.list(all=True, filters=named, sparse=True)
        own = [each for each in containers if LABEL in each.attrs["Labels"] and project.contains(each.attrs["Labels"])]
        for container in own:
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)
        if len(own) == len(containers):
            for network in client.networks.list(filters={"label": [LABEL, f"{PROJECT_LABEL}={project.name}"]}):
                with contextlib.suppress(NotFound):
                    network.remove()


def used_memory_bytes(container: Any) -> int:
    """Return the memory that a container of the SDK uses, without file pages that the kernel can drop."""
    memory = container.stats(stream=False, one_shot=True)["memory_stats"]
    droppable = memory["stats"].get("total_inactive_file", memory["stats"].get("inactive_file", 0))  # cgroups v1, v2
    return int(memory["usage"] - droppable)
