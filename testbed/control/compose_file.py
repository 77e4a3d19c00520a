"""The Compose file for any number of nodes, from one template; compose.yaml is its rendering for four."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from testbed import __version__
from testbed.spec.errors import refuse
from testbed.spec.run import SCHEMA

TEMPLATE = "compose.yaml.j2"
CPU_PERIOD = 10_000  # microseconds; a node's quota is a part of it
MAX_NODES = 256


def render(nodes: int = 4, folder: Path = ROOT / "docker") -> str:
    """The file's text."""
    if not 1 <= nodes <= MAX_NODES:
        raise refuse("nodes", nodes, f"must be 1 to {MAX_NODES}", "Use e.g. 4.")
    templates = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True)
    return templates.get_template(TEMPLATE).render(nodes=nodes, version=__version__, schema=SCHEMA)
