"""What a run without a controller is asked, by environment variables: `.env.example` lists them with their defaults.

No torch here: the container's entrypoint reads the same request before it shapes the network.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.spec.errors import SpecError, refuse
from testbed.spec.experiment import run_name, with_settings
from testbed.spec.link import Link
from testbed.spec.run import RunSpec

COMPOSE, LAUNCHED = "compose", "launched"  # who started the ranks; their runs lie in runs/ under that name
SHAPINGS = ("both", "egress", "off")
UNTOUCHED = "none"  # a launcher's nodes have the network they have
NOT_THERE = ("RATE", "CPU_QUOTA", "CONGESTION")  # what nobody would apply on them, as variables
KEYS_NOT_THERE = ("link", "node", "overrides")  # and as keys of the spec
CPU_PERIOD = 10_000  # microseconds; CPU_QUOTA is a part of it
PORT = 29_500  # of the store; the two after it are those of the presence and of the probe
# Variable -> key of the spec. All go in as text, and the spec refuses what it does not like.
KEYS = {
    "MODE": "mode",
    "NODES": "nodes",
    "RATE": "link.rate",
    "MODEL": "model",
    "DATA": "data.name",
    "BATCH": "batch",
    "STEPS": "steps",
    "SEED": "seed",
    "CONGESTION": "node.congestion",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One node's part of a request; the spec is the same on all of them."""

    spec: RunSpec
    rank: int
    place: str  # COMPOSE or LAUNCHED
    shaping: str  # one of SHAPINGS, or UNTOUCHED
    interface: str  # empty: by the way to rank 0
    master: str  # name or address of rank 0
    port: int
    folder: Path | None  # where the entrypoint made the run's folder; None: rank 0 makes it
    note: str  # what the entrypoint could not do, for the table

    @property
    def link(self) -> Link:
        """This node's own."""
        return self.spec.link_of(self.rank)

    @property
    def unshaped(self) -> str:
        """Why the run stays out of tables though nothing failed; empty where the network is shaped both ways."""
        left = {"egress": "what arrives at a node is not shaped", "off": "nothing is shaped"}
        return f"SHAPING={self.shaping}: {left[self.shaping]}" if self.shaping in left else ""


def ask(env: Mapping[str, str]) -> Asked:
    """Read and check everything; SpecError with the value, the rule and the way out."""
    launched = bool(env.get("WORLD_SIZE")) and not env.get("NODES")
    shaping = UNTOUCHED if launched else env.get("SHAPING") or "both"
    if shaping not in (*SHAPINGS, UNTOUCHED):
        raise refuse("SHAPING", shaping, "is no way to shape", f"Use one of {', '.join(SHAPINGS)}.")
    if launched:
        _check_launched(env)
    spec = _spec(dict(env) | {"NODES": env["WORLD_SIZE"]} if launched else env, shaping, launched)
    rank = _number(env, "RANK", 0)
    if rank >= spec.nodes:
        raise refuse("RANK", rank, f"there are {spec.nodes} nodes", f"Use 0 to {spec.nodes - 1}.")
    return Asked(
        spec=spec,
        rank=rank,
        place=LAUNCHED if launched else COMPOSE,
        shaping=shaping,
        interface=env.get("GLOO_SOCKET_IFNAME") or ("" if launched else "eth0"),
        master=env.get("MASTER_ADDR") or "rank0",
        port=spec.port or _number(env, "MASTER_PORT", PORT),
        folder=Path(env["TESTBED_RUN"]) if env.get("TESTBED_RUN") else None,
        note=env.get("TESTBED_NOTE", ""),
    )


def _check_launched(env: Mapping[str, str]) -> None:
    """What nobody would apply is refused, not swallowed."""
    settings = [setting for setting in _words(env.get("SET", "")) if _key(setting).split(".")[0] in KEYS_NOT_THERE]
    asked = [(name, env[name]) for name in NOT_THERE if env.get(name)] + [("SET", setting) for setting in settings]
    if asked:
        rule = "ranks that a launcher starts have the network and the processor that are there"
        raise refuse(*asked[0], rule, "Leave it out, or use docker compose up.")


def _spec(env: Mapping[str, str], shaping: str, launched: bool) -> RunSpec:
    asked = {name: env[name] for name in KEYS if env.get(name) and (name != "RATE" or shaping != "off")}
    values: dict[str, Any] = {
        "experiment": LAUNCHED if launched else COMPOSE,
        "name": run_name(env.get("MODE") or "ring", env.get("NODES") or 4),
    }
    if quota := _number(env, "CPU_QUOTA", 0):
        values["node"] = {"cpus": quota / CPU_PERIOD}
    values = with_settings(values, [f"{KEYS[name]}={_quoted(text)}" for name, text in asked.items()])
    settings = _words(env.get("SET", ""))
    for key in map(_key, settings):
        if key in ("node", "nodes", "node.cpus") or re.fullmatch(r"overrides(\.node\d+(\.cpus)?)?", key):
            way_out = "Use CPU_QUOTA for all nodes, or `testbed run --on compose` for one."
            raise refuse("SET", key, "containers that are up already cannot change their number or share", way_out)
    spec = RunSpec.load(with_settings(values, settings, "SET"), where="")
    if spec.faults or spec.retries:
        rule = "somebody outside must inject faults and restart ranks"
        raise refuse("SET", "faults, retries", rule, "Use `testbed run --on compose`.")
    return _unshaped(spec) if shaping in ("off", UNTOUCHED) else spec


def _unshaped(spec: RunSpec) -> RunSpec:
    """What is not applied does not stand in the spec."""
    node = spec.node.model_copy(update={"congestion": None})
    return spec.model_copy(update={"link": Link(), "overrides": {}, "node": node})


def _quoted(text: str) -> str:
    """As TOML text: bare, the seed 007 or the mode 1e5 would be read as something else."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"SET {text!r}: cannot be read ({error}). Write SET='key=value key=value'.") from None


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise refuse(name, text, "must be a whole number", f"Write e.g. {name}={default}.")
    return int(text)
