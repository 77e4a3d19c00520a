"""Inventory: a TOML file that lists the nodes of a cluster of real hosts, in rank order."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, model_validator

from testbed.spec.base import Spec
from testbed.spec.errors import SpecError, refuse
from testbed.spec.experiment import read_toml

NAME = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$"  # no character that a shell or a path treats specially
VARIABLE = "TESTBED_INVENTORY"
DEFAULT = Path("inventory/hosts.toml")
EXAMPLE = Path("inventory/hosts.example.toml")


class HostNode(Spec):
    """One host, which runs one rank. SSH settings that are None come from the user's SSH configuration."""

    name: str = Field(pattern=NAME)
    address: str = Field(pattern=r"^[A-Za-z0-9:]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?$")  # or an SSH alias
    user: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$")
    port: int | None = Field(default=None, ge=1, le=65535)
    key: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_~/][A-Za-z0-9_.~/@+-]{0,254}$")
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")
    cpus: float | None = Field(default=None, gt=0, le=1024)
    jump: str | None = Field(default=None, pattern=NAME)


class Inventory(Spec):
    """The nodes, in rank order."""

    nodes: tuple[HostNode, ...] = Field(min_length=1, max_length=256)

    @classmethod
    def read(cls, path: Path) -> Inventory:
        """Read a file; SpecError if it is missing or has a wrong value."""
        if not path.exists() and path == DEFAULT:
            raise SpecError(f"{path}: no such file. Make it from the example: cp {EXAMPLE} {path}, and edit it.")
        return cls.load(read_toml(path), str(path))

    def first(self, nodes: int) -> Inventory:
        """The first hosts, for a run with that many ranks; SpecError if there are fewer."""
        if nodes > len(self.nodes):
            rule = f"the inventory has {len(self.nodes)} hosts, and each runs one rank"
            raise refuse("nodes", nodes, rule, f"Use {len(self.nodes)} or fewer, or add hosts.")
        return Inventory(nodes=self.nodes[:nodes])

    @model_validator(mode="after")
    def _names_differ(self) -> Inventory:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"nodes {twice}: node names must be unique. Rename all but one")
        return self


def read_inventory(given: Path | None = None) -> Inventory:
    """Read the given file, else that of TESTBED_INVENTORY, else inventory/hosts.toml."""
    return Inventory.read(given or Path(os.environ.get(VARIABLE) or DEFAULT))
