"""ScriptSpec: a training script of the user's, which runs unchanged on every node.

Its command line may contain placeholders, e.g. `python main.py --rank {rank}`. torchrun's variables (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) are always in its environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from pydantic import Field, field_validator

from testbed.spec.base import Spec, validator
from testbed.spec.errors import refuse

PLACEHOLDERS = {
    "rank": "number of the node, from 0",
    "world": "number of nodes",
    "master": "address of node 0",
    "port": "port on node 0 that is free for the rendezvous",
    "address": "address of this node",
    "interface": "network interface of this node",
}
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
MAX_OUTPUT_BYTES = 64 << 20  # of a rank's log
INTERPRETERS = ("python", "python3", "torchrun", "fabric", "lightning", "accelerate")


def fill(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace every placeholder; `{{` and `}}` stand for single braces. Raises UsageError for an unknown one."""

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            way_out = f"Known: {known}. For the text itself write {{{match[0]}}}."
            raise refuse("placeholder", match[0], "is not known", way_out)
        return values[match[1]]

    return [_PLACEHOLDER.sub(replace, word) for word in argv]


def _check_placeholders(argv: tuple[str, ...]) -> tuple[str, ...]:
    fill(argv, dict.fromkeys(PLACEHOLDERS, ""))
    return argv


class ScriptSpec(Spec):
    """A script as it is started on every node."""

    argv: tuple[str, ...] = Field(min_length=1, max_length=1000)  # with placeholders
    folder: str  # absolute; every rank gets a copy of it as its working folder
    path: str = ""  # PATH of the script; empty: that of the substrate's nodes
    environment: dict[str, str] = {}  # besides torchrun's variables and a short list of the caller's
    as_cpu: bool = False  # run a script that was written for CUDA on the CPU
    output: int = Field(default=MAX_OUTPUT_BYTES, gt=0)  # bytes of a rank's log; what exceeds it is dropped

    @field_validator("argv")
    @classmethod
    def _known_placeholders(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        return validator(_check_placeholders)(argv)

    @property
    def name(self) -> str:
        """The name of the script for tables: the first word that ends in .py, else the command."""
        words = [word for word in self.argv if word.endswith(".py")] or list(self.argv[:1])
        return PurePath(words[0]).name
