"""Request: the part of one rank in a run, read once from the arguments and the environment.

Three callers start `python -m testbed.rank`:

    the controller          --folder RUN  spec.json is there; the controller measures and concludes
    docker/entrypoint.py    --spec FILE   it has read the variables, shaped the network and fetched the data set
    torchrun, srun, a user  no argument   the variables are read here; .env.example lists them

All callers set RANK, MASTER_ADDR and MASTER_PORT as torchrun does, and WORLD_SIZE or NODES. This module does not import
torch: the container's entrypoint reads the same request before it shapes the network.

The variables are read from a mapping, not by pydantic-settings. Most of them are flags of `testbed run` in upper case,
so `spec_from_flags` checks flags and variables with the same rules and messages. SET holds several settings at once.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testbed.results.folder import MAX_SPEC_BYTES, RunFolder, read_bounded
from testbed.results.receipt import RATE_VARIABLE
from testbed.spec.errors import SpecError, refuse
from testbed.spec.experiment import spec_from_flags
from testbed.spec.link import Link, parse_shaping, why_not_shaped
from testbed.spec.resources import CPU_PERIOD_US
from testbed.spec.run import DEFAULT_PORT, RunSpec
from testbed.spec.words import VARIABLES, Place, reading, refuse_setting

COMPOSE, LAUNCHED = "compose", "launched"  # substrates without a controller; their runs are in runs/<substrate>/
PLACES = {COMPOSE: Place.COMPOSE, LAUNCHED: Place.LAUNCHER}
UNSHAPED = "none"  # a launcher's nodes keep their network as it is
NOT_FOR_LAUNCHERS = ("RATE", "CPU_QUOTA", "CONGESTION")  # variables that no launcher applies
# keys of the spec that a launcher cannot apply, so they are refused
KEYS_NOT_FOR_LAUNCHERS = ("link", "node", "overrides")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one rank has to do in a run. The spec must be the same on all ranks."""

    spec: RunSpec
    rank: int
    supervised: bool  # a controller measures the network before the run and writes the summary after it
    master: str  # name or address of rank 0's node
    port: int  # where rank 0 opens the store
    interface: str  # of this node; empty: the interface of the route to rank 0
    folder: Path | None = None  # the run folder, if it exists already; None: rank 0 makes it
    resume: bool = False  # continue from the last checkpoint that all ranks have
    rate: float | None = None  # byte/s of payload on the slowest link, as the controller measured it
    substrate: str = ""  # COMPOSE or LAUNCHED; empty under a controller
    shaping: str = UNSHAPED  # one of SHAPINGS, or UNSHAPED
    synthetic: str = ""  # why synthetic images replace the data set that was requested; rank 0 decides for all
    notes: tuple[str, ...] = ()  # for the table and summary.json; only those of rank 0 are used

    @property
    def link(self) -> Link:
        """The link of this node."""
        return self.spec.link_of(self.rank)

    @property
    def not_shaped(self) -> str:
        """Why the run is left out of tables although nothing failed; empty if the network is shaped both ways."""
        return why_not_shaped(self.shaping)

    @property
    def place(self) -> Place:
        """Where the messages of this rank are read."""
        return PLACES.get(self.substrate, Place.COMMAND_LINE)

    @property
    def probe_port(self) -> int:
        return self.port + 1


def read_request(arguments: Sequence[str], env: Mapping[str, str]) -> Request:
    """Return the request of `python -m testbed.rank`. Raises UsageError if an argument or a variable is wrong."""
    parser = argparse.ArgumentParser(prog="testbed.rank", description="One rank of a run.")
    parser.add_argument("--folder", type=Path, help="run folder; without --spec, a controller made it with its spec")
    parser.add_argument("--spec", type=Path, help="file with the spec, instead of variables; there is no controller")
    parser.add_argument("--synthetic", default="", metavar="WHY", help="train on synthetic images, for this reason")
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a note for the run's summary")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint that all ranks have")
    options = parser.parse_args(arguments)
    if options.folder and not options.spec:
        return _supervised(options.folder, options.resume, env)
    spec = None
    if options.spec:
        spec = RunSpec.from_json(read_bounded(options.spec, MAX_SPEC_BYTES).decode(errors="replace"), str(options.spec))
    more = {"folder": options.folder, "synthetic": options.synthetic, "notes": tuple(options.note)}
    return replace(request_from_environment(env, spec=spec), **more)


def _supervised(path: Path, resume: bool, env: Mapping[str, str]) -> Request:
    folder, rank = RunFolder(path), _number(env, "RANK", 0)
    spec = folder.read_spec()
    folder.own_file(spec, "mode")  # raises SpecError if it is not the file that the controller copied
    size = _number(env, "WORLD_SIZE", spec.world)
    if size != spec.world:
        raise SpecError(f"WORLD_SIZE {size}: the spec is for {spec.world} ranks. Start that many, or change nodes.")
    if rank >= size:
        raise SpecError(f"RANK {rank}: ranks count from 0 to {size - 1}. Start each of them once.")
    return Request(
        spec=spec,
        rank=rank,
        supervised=True,
        master=env.get("MASTER_ADDR") or "127.0.0.1",
        port=_number(env, "MASTER_PORT", DEFAULT_PORT),
        interface=env.get("GLOO_SOCKET_IFNAME") or "lo",
        folder=path,
        resume=resume,
        rate=float(env.get(RATE_VARIABLE, 0)) or None,
    )


def request_from_environment(env: Mapping[str, str], *, spec: RunSpec | None = None) -> Request:
    """Return the request of a rank without a controller. `spec` replaces the variables that describe the run."""
    launched = bool(env.get("WORLD_SIZE")) and not env.get("NODES")
    shaping = UNSHAPED if launched else parse_shaping(env.get("SHAPING", ""))
    if launched:
        _check_launched(env)
    _check_nodes(env)
    if spec is None:
        with reading(PLACES[LAUNCHED if launched else COMPOSE]):
            spec = _spec(dict(env) | {"NODES": env["WORLD_SIZE"]} if launched else env, shaping, launched)
    rank = _number(env, "RANK", 0)
    if rank >= spec.nodes:
        raise refuse("RANK", rank, f"there are {spec.nodes} nodes", f"Use 0 to {spec.nodes - 1}.")
    return Request(
        spec=spec,
        rank=rank,
        supervised=False,
        master=env.get("MASTER_ADDR") or "rank0",
        port=spec.port or _number(env, "MASTER_PORT", DEFAULT_PORT),
        interface=env.get("GLOO_SOCKET_IFNAME") or ("" if launched else "eth0"),
        substrate=LAUNCHED if launched else COMPOSE,
        shaping=shaping,
    )


def _check_nodes(env: Mapping[str, str]) -> None:
    """Raise SpecError if the user requests another number of nodes than the Compose file has.

    The Compose file passes the user's value on as NODES_REQUESTED.
    """
    there, requested = env.get("NODES", ""), env.get("NODES_REQUESTED", "")
    if there and requested and requested != there:
        way_out = f"Leave it out, or use `testbed run --on compose --nodes {requested}`."
        raise refuse("NODES", requested, f"compose.yaml has {there} nodes", way_out)


def _check_launched(env: Mapping[str, str]) -> None:
    """Raise SpecError for a setting that no launcher applies, instead of ignoring the setting."""
    settings = [each for each in _words(env.get("SET", "")) if _key(each).split(".")[0] in KEYS_NOT_FOR_LAUNCHERS]
    found = [(name, env[name]) for name in NOT_FOR_LAUNCHERS if env.get(name)] + [("SET", each) for each in settings]
    if found:
        rule = "ranks that a launcher starts use the network and the processor as they are"
        raise refuse(*found[0], rule, "Leave it out, or use docker compose up.")


def _spec(env: Mapping[str, str], shaping: str, launched: bool) -> RunSpec:
    flags: dict[str, Any] = {name.lower(): env[name] for name in VARIABLES if env.get(name)}
    if shaping == "off":
        flags.pop("rate", None)
    if quota := _number(env, "CPU_QUOTA", 0):
        flags["node"] = {"cpus": quota / CPU_PERIOD_US}
    settings = _words(env.get("SET", ""))
    for key in map(_key, settings):
        if key in ("node", "nodes", "node.cpus") or re.fullmatch(r"overrides(\.node\d+(\.cpus)?)?", key):
            way_out = "Use CPU_QUOTA for all nodes, or `testbed run --on compose` for one."
            raise refuse("SET", key, "running containers cannot change their number or CPU share", way_out)
    spec = spec_from_flags({"experiment": LAUNCHED if launched else COMPOSE} | flags, settings)
    for key in ("model", "data.name"):
        if key in spec.own_files:
            name, own = spec.own_files[key]
            rule = f"only a controller brings {own.path} to the ranks"
            raise refuse_setting(key, name, rule, "Use `testbed run`.")
    spec = spec.with_files()  # adds the checksum of the mode's file, so that ranks detect a node with another file
    if spec.topology.trunk is not None and shaping not in ("off", UNSHAPED):
        rule = "only a controller can make racks with an uplink; without it, racks only group nodes for `hierarchical`"
        raise refuse("SET", "topology.uplink, topology.delay", rule, "Leave it out, or use `testbed run`.")
    if spec.faults or spec.retries:
        rule = "a start without `testbed run` cannot inject faults or restart ranks"
        raise refuse("SET", "faults, retries", rule, "Use `testbed run --on compose`.")
    if launched:  # a launcher's ranks run on the cores that it gives them
        spec = spec.model_copy(update={"node": spec.node.model_copy(update={"pinned": False})})
    return spec.without_shaping(keep_cpus=True) if shaping in ("off", UNSHAPED) else spec


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
