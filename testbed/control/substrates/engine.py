"""The Docker engine of this machine: is it there, can it do what is requested, and which projects of ours it has.

Also the Compose file: compose.yaml is the rendering of docker/compose.yaml.j2 for four nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed import __version__
from testbed.control.machine.processes import run
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.content import ROOT, content_hash
from testbed.control.substrates.docker_cli import (
    IMAGE,
    LABEL,
    OWNER_LABEL,
    PROJECT_LABEL,
    image_content_argv,
    list_argv,
    list_networks_argv,
    rehearse_argv,
    remove_argv,
    server_version_argv,
)
from testbed.control.substrates.links import rehearsals, rehearse
from testbed.spec.cpu import CPU_PERIOD_US
from testbed.spec.errors import CommandFailed, Unavailable, refuse, require_extra
from testbed.spec.run import SCHEMA

TEMPLATE = "compose.yaml.j2"
MAX_NODES = 256
ENGINE_TIMEOUT_S = 120.0  # creating four containers takes a few seconds
RUNNING, NOBODY = "running", "nobody"  # owners of a project that `docker compose up` made


def render(nodes: int = 4, folder: Path = ROOT / "docker") -> str:
    """Return the text of the Compose file for so many nodes."""
    if not 1 <= nodes <= MAX_NODES:
        raise refuse("nodes", nodes, f"must be 1 to {MAX_NODES}", "Use e.g. 4.")
    require_extra("substrate compose", "compose", "jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True)
    values = {"nodes": nodes, "version": __version__, "schema": SCHEMA, "cpu_period": CPU_PERIOD_US}
    return templates.get_template(TEMPLATE).render(**values)


def engine_version() -> str:
    """Return the version of the engine that answers; raise Unavailable if none does."""
    try:
        return run(server_version_argv(), ENGINE_TIMEOUT_S).strip()
    except FileNotFoundError:
        reason = "the command docker is missing"
    except CommandFailed as error:
        reason = (error.output or str(error)).partition(". ")[0]
    raise Unavailable(f"substrate compose: no Docker engine answers ({reason}). Start one; `make engine` installs it")


def compose_version() -> str:
    """Return the version of the Compose plugin; raise Unavailable if there is none."""
    try:
        return run(["docker", "compose", "version", "--short"], ENGINE_TIMEOUT_S).strip()
    except (CommandFailed, OSError):
        raise Unavailable(
            "substrate compose: `docker compose` is missing. Install Compose v2, or `make engine`"
        ) from None


def image_content() -> str:
    """Return a sentence with the image's content hash; raise Unavailable if it is missing or made from other code."""
    now = content_hash()
    engine_version()
    try:
        made = run(image_content_argv(), ENGINE_TIMEOUT_S).strip() or "unknown"
    except CommandFailed:
        raise Unavailable(f"substrate compose: image {IMAGE} is missing. Build it with `make image`") from None
    if made != now:
        differs = f"was made from other code (content {made}, the code here is {now})"
        raise Unavailable(f"substrate compose: image {IMAGE} {differs}. Build it again with `make image`")
    return f"up to date, content {made}"


def check(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable if engine, Compose or image are missing, or if the engine's kernel cannot shape the links."""
    engine_version()
    compose_version()
    image_content()
    for commands, feature in rehearsals(plans):
        # The loopback of a container that is thrown away: its kernel is the engine's, wherever the engine runs.
        whole = [["ip", "link", "set", "lo", "up"], *commands]
        rehearse("substrate compose: the engine's kernel", whole, feature, _run_in_container)


def _run_in_container(script: str) -> None:
    run(rehearse_argv(script), ENGINE_TIMEOUT_S)


def projects() -> dict[str, str]:
    """Return our Compose projects with their owners; without an engine an empty dictionary.

    A project that `docker compose up` made has the owner RUNNING while a container of it runs, else NOBODY.
    """
    try:
        engine_version()
    except Unavailable:
        return {}
    marks = f'{{{{.Label "{PROJECT_LABEL}"}}}}\t{{{{.Label "{OWNER_LABEL}"}}}}'
    networks = run(list_networks_argv(LABEL, columns=marks), ENGINE_TIMEOUT_S)
    containers = run(list_argv(LABEL, PROJECT_LABEL, columns=f"{marks}\t{{{{.State}}}}"), ENGINE_TIMEOUT_S)
    found: dict[str, str] = {}
    for line in networks.splitlines():
        project, owner = line.split("\t")
        found[project] = owner or NOBODY
    for line in containers.splitlines():
        project, owner, state = line.split("\t")
        without_owner = RUNNING if state in ("running", "paused") else found.get(project, NOBODY)
        found[project] = owner or without_owner
    return found


def remove_project(project: str) -> None:
    """Remove the containers and networks of a project; what is gone already is ignored."""
    label = f"{PROJECT_LABEL}={project}"
    for container in run(list_argv(label), ENGINE_TIMEOUT_S).split():
        _run_unless_gone(remove_argv([container]))
    for network in run(list_networks_argv(label), ENGINE_TIMEOUT_S).split():
        _run_unless_gone(["docker", "network", "rm", network])


def _run_unless_gone(argv: list[str]) -> None:
    try:
        run(argv, ENGINE_TIMEOUT_S)
    except CommandFailed as error:
        if "no such" not in error.output.lower() and "not found" not in error.output.lower():
            raise
