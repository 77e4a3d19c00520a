"""The Docker engine: is it there, can it do what is asked, and what of ours is on it."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import __version__
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.content import ROOT, content_hash
from testbed.control.substrates.process import run
from testbed.net.shaping import shape
from testbed.spec.errors import TestbedError, Unavailable, refuse, require_extra
from testbed.spec.link import Link
from testbed.spec.run import SCHEMA

if TYPE_CHECKING:
    from docker import DockerClient

# The Compose file for any number of nodes, from one template; compose.yaml is its rendering for four.

TEMPLATE = "compose.yaml.j2"
CPU_PERIOD = 10_000  # microseconds; a node's quota is a part of it
MAX_NODES = 256


def render(nodes: int = 4, folder: Path = ROOT / "docker") -> str:
    """The file's text."""
    if not 1 <= nodes <= MAX_NODES:
        raise refuse("nodes", nodes, f"must be 1 to {MAX_NODES}", "Use e.g. 4.")
    require_extra("substrate compose", "compose", "jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True)
    return templates.get_template(TEMPLATE).render(nodes=nodes, version=__version__, schema=SCHEMA)


IMAGE = "testbed:latest"
LABEL = "testbed"  # on every container and network of ours
OWNER_LABEL = "testbed.owner"  # on those that a controller made: who it is
PROJECT_LABEL = "com.docker.compose.project"
RUNNING, NOBODY = "running", "nobody"  # owners of a project that no controller made
TIMEOUT = 120.0  # seconds; making four containers takes a few


def connect() -> DockerClient:
    """The engine, or Unavailable."""
    require_extra("substrate compose", "compose", "docker")
    import docker  # here, because it takes a while, and most commands never talk to an engine
    from docker.errors import DockerException

    try:
        _knock(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
        client = docker.from_env(timeout=60)
        client.ping()
        return client
    except (DockerException, OSError) as error:
        reason = str(error).split("(", 1)[0].strip()
        way_out = "Start one; `make engine` installs it"
        raise Unavailable(f"substrate compose: no Docker engine answers ({reason}). {way_out}") from None


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """What the engine refuses becomes an error of ours."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:
        reason = getattr(error, "explanation", None) or str(error)
        raise TestbedError(f"the Docker engine refused: {str(reason).strip()}") from None


def _knock(host: str) -> None:
    """Ask a local socket first: where nobody listens, the SDK would leave its own half open."""
    kind, _, path = host.partition("://")
    if kind == "unix":
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(5.0)
            try:
                door.connect(path)
            except OSError as error:
                raise OSError(f"{path}: {error.strerror}") from None


def engine_version() -> str:
    """Of the engine that answers."""
    with contextlib.closing(connect()) as client:
        return str(client.version()["Version"])


def compose_version() -> str:
    """Of the plugin that the command line has."""
    try:
        return run(["docker", "compose", "version", "--short"], TIMEOUT).strip()
    except (TestbedError, OSError):
        raise Unavailable(
            "substrate compose: `docker compose` is missing. Install Compose v2, or `make engine`"
        ) from None


def image_content() -> str:
    """The content hash the image is labelled with."""
    now = content_hash()
    with contextlib.closing(connect()) as client:
        from docker.errors import ImageNotFound

        try:
            labels = client.images.get(IMAGE).labels
        except ImageNotFound:
            raise Unavailable(f"substrate compose: image {IMAGE} is missing. Build it with `make image`") from None
    made = labels.get("testbed.content", "unknown")
    if made != now:
        differs = f"was made from other code (content {made}, the code here is {now})"
        raise Unavailable(f"substrate compose: image {IMAGE} {differs}. Make it anew with `make image`")
    return f"up to date, content {made}"


def check(plans: Sequence[NodePlan]) -> None:
    """Engine, Compose and image are there, and the engine's kernel can do what the links ask."""
    engine_version()
    compose_version()
    image_content()
    for link in dict.fromkeys(plan.link for plan in plans if plan.link.shaped):
        _rehearse(link)


def _rehearse(link: Link) -> None:
    """Shape the loopback of a container that ends at once: its kernel is the engine's, wherever that is."""
    script = " && ".join(shlex.join(command) for command in [["ip", "link", "set", "lo", "up"], *shape(link, "lo")])
    alone = ["--network", "none", "--cap-drop", "ALL", "--cap-add", "NET_ADMIN", "--entrypoint", "sh"]
    try:
        run(["docker", "run", "--rm", *alone, IMAGE, "-c", script], TIMEOUT)
    except TestbedError as error:
        lacks = "delay and loss (netem)" if link.needs_netem else "shaping (tbf, ifb, ingress, u32, mirred)"
        reason = str(error).rpartition(": ")[2].replace("\n", " ").rstrip(".")
        raise Unavailable(
            f"substrate compose: the engine's kernel lacks {lacks}: {reason}. Leave it out, or load the module"
        ) from None


def remove_project(project: str) -> None:
    """Remove the containers and networks of a dead controller's project."""
    with contextlib.closing(connect()) as client, in_words():
        from docker.errors import NotFound

        label = {"label": f"{PROJECT_LABEL}={project}"}
        for container in client.containers.list(all=True, filters=label, ignore_removed=True):
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)
        for network in client.networks.list(filters=label):
            with contextlib.suppress(NotFound):
                network.remove()


def projects() -> dict[str, str]:
    """Compose projects of ours with their owner; what `docker compose up` made is owned by its running containers."""
    try:
        client = connect()
    except Unavailable:
        return {}
    with in_words(), contextlib.closing(client):
        found: dict[str, str] = {}
        for network in client.networks.list(filters={"label": LABEL}):
            labels = network.attrs.get("Labels") or {}
            found[labels[PROJECT_LABEL]] = labels.get(OWNER_LABEL, NOBODY)
        ours = {"label": [LABEL, PROJECT_LABEL]}
        for container in client.containers.list(all=True, filters=ours, ignore_removed=True):
            name = container.labels[PROJECT_LABEL]
            alone = RUNNING if container.status in ("running", "paused") else found.get(name, NOBODY)
            found[name] = container.labels.get(OWNER_LABEL, alone)
        return found
