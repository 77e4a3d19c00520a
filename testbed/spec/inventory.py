"""Inventory: a TOML file that lists the nodes of a cluster of real hosts, in rank order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from testbed.spec.base import Spec
from testbed.spec.errors import SpecError
from testbed.spec.experiment import read_toml
from testbed.spec.words import refuse_setting, setting

NAME = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$"  # no character that a shell or a path treats specially
NAME_RULE = "letters, digits, . and -, with a letter or digit at both ends, at most 63 characters"
ADDRESS = r"^[A-Za-z0-9:]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?$"
ADDRESS_RULE = "a host name, an IPv4 or IPv6 address, or an SSH alias: letters, digits, ., : and -, without a port"
VARIABLE = "TESTBED_INVENTORY"
DEFAULT = Path("inventory/hosts.toml")
EXAMPLE = Path("inventory/hosts.example.toml")


def _without_brackets(address: object) -> object:
    """Return fe80::1 for [fe80::1]: brackets separate an IPv6 address from a port, and `port` is a key of its own."""
    if isinstance(address, str) and address.startswith("[") and address.endswith("]"):
        return address[1:-1]
    return address


class HostNode(Spec):
    """One host, which runs one rank. SSH settings that are None come from the user's SSH configuration."""

    name: str = Field(pattern=NAME, description=NAME_RULE, examples=["node0"])
    address: Annotated[str, BeforeValidator(_without_brackets)] = Field(
        pattern=ADDRESS, description=ADDRESS_RULE, examples=["192.0.2.11"]
    )
    user: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$",
        description="the name of a user: letters, digits, _, . and -, at most 32 characters",
        examples=["ann"],
    )
    port: int | None = Field(default=None, ge=1, le=65535, examples=[22])
    key: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_~/][A-Za-z0-9_.~/@+-]{0,254}$",
        description="the path of a private key: letters, digits and _ . ~ / @ + -, at most 255 characters",
        examples=["~/.ssh/id_ed25519"],
    )
    interface: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$",
        description="the name of a network interface: letters, digits, _, . and -, at most 15 characters",
        examples=["eth0"],
    )
    cpus: float | None = Field(default=None, gt=0, le=1024, examples=[2.0])
    jump: str | None = Field(default=None, pattern=NAME, description=NAME_RULE, examples=["bastion.example.org"])


class Inventory(Spec):
    """The nodes, in rank order."""

    nodes: tuple[HostNode, ...] = Field(
        min_length=1, max_length=256, examples=[[{"name": "node0", "address": "192.0.2.11"}]]
    )

    @classmethod
    def read(cls, path: Path) -> Inventory:
        """Read a file. Raises SpecError if the file is missing or has a wrong value."""
        if not path.exists() and path == DEFAULT:
            raise SpecError(f"{path}: no such file. Make it from the example: cp {EXAMPLE} {path}, and edit it.")
        return cls.load(read_toml(path), str(path))

    def first(self, nodes: int) -> Inventory:
        """Return an inventory of the first `nodes` hosts. Raises SpecError if there are fewer."""
        if nodes > len(self.nodes):
            rule = f"the inventory has {len(self.nodes)} hosts, and each runs one rank"
            raise refuse_setting("nodes", nodes, rule, f"Use {setting('nodes', len(self.nodes))}, or add hosts.")
        return Inventory(nodes=self.nodes[:nodes])

    @model_validator(mode="after")
    def _names_differ(self) -> Inventory:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"nodes {twice}: node names must be unique. Rename all but one.")
        return self


def read_inventory(given: Path | None = None) -> Inventory:
    """Read the given file, else the file that TESTBED_INVENTORY names, else inventory/hosts.toml. Raises SpecError."""
    return Inventory.read(given or Path(os.environ.get(VARIABLE) or DEFAULT))
