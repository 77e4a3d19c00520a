"""Inventory: a TOML file that names the nodes of a cluster of real hosts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from testbed.spec.base import Spec
from testbed.spec.experiment import read_toml

NAME = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$"  # nothing a shell or a path reads as more


class HostNode(Spec):
    """One host that runs one rank."""

    name: str = Field(pattern=NAME)
    address: str = Field(pattern=r"^[A-Za-z0-9:]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?$")
    user: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,31}$")
    port: int = Field(default=22, ge=1, le=65535)
    key: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_~/][A-Za-z0-9_.~/@+-]{0,254}$")
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")
    cpus: float | None = Field(default=None, gt=0, le=1024)
    jump: str | None = Field(default=None, pattern=NAME)


class Inventory(Spec):
    """The nodes, in rank order."""

    nodes: tuple[HostNode, ...] = Field(min_length=1, max_length=256)

    @classmethod
    def read(cls, path: Path) -> Inventory:
        return cls.load(read_toml(path), str(path))

    @model_validator(mode="after")
    def _names_differ(self) -> Inventory:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"nodes {twice}: a name stands for one node. Rename all but one")
        return self
