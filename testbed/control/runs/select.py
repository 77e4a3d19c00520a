"""Place: which substrate a run happens on, and why that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.compose import ComposeSubstrate
from testbed.control.substrates.engine import check as check_compose
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.control.substrates.netns import check as check_netns
from testbed.control.substrates.process import ProcessSubstrate
from testbed.control.substrates.process import check as check_process
from testbed.spec.errors import SpecError, Unavailable, refuse, require_extra
from testbed.spec.fault import KINDS as FAULTS
from testbed.spec.inventory import Inventory
from testbed.spec.link import Link
from testbed.spec.run import NodeOverride, RunSpec


@dataclass(frozen=True)
class Kind:
    """One kind of place: how it is made, whether this machine has it, and what it is in words."""

    make: Callable[[Sequence[NodePlan], Path], Substrate]
    check: Callable[[Sequence[NodePlan]], None]  # raises Unavailable
    what: str
    shapes: bool = True
    here: Callable[[], bool] = lambda: False  # whether its nodes share this machine's cores
    faults: Collection[str] = FAULTS  # kinds of faults that can be injected there


def _always() -> bool:
    return True


def _engine_is_local() -> bool:
    return os.environ.get("DOCKER_HOST", "unix://").startswith("unix://")


KINDS: dict[str, Kind] = {  # best first
    "compose": Kind(
        ComposeSubstrate, check_compose, "one container per node, links shaped as asked", here=_engine_is_local
    ),
    "netns": Kind(NetnsSubstrate, check_netns, "network namespaces, links shaped as asked", here=_always),
    "process": Kind(
        ProcessSubstrate,
        check_process,
        "plain processes on loopback, unshaped, no CPU limit",
        shapes=False,
        here=_always,
        faults=("kill", "exit", "pause", "disk-full"),
    ),
}


HOSTS = "hosts"
MEASURED = "the network of real hosts is measured, never shaped"
ELSEWHERE = "use `testbed` with --on compose or netns for a network you choose"


@dataclass(frozen=True)
class Place:
    """A substrate by name, and the sentence that says why it was picked."""

    name: str
    why: str
    shapes: bool
    beside: bool = field(default=False, kw_only=True)  # measure although another does

    @property
    def here(self) -> bool:
        """Whether its nodes share this machine's cores."""
        return KINDS[self.name].here()

    @property
    def faults(self) -> Collection[str]:
        """The kinds of faults that can be injected there."""
        return KINDS[self.name].faults

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether they outlive the run."""
        return True

    def make(self, spec: RunSpec, folder: Path) -> Substrate:
        return KINDS[self.name].make(plans(spec), folder)

    def fit(self, spec: RunSpec) -> RunSpec:
        """The run as this place can do it: where nothing is shaped, no rate stands in the spec."""
        if self.shapes:
            return spec
        node = spec.node.model_copy(update={"cpus": None, "congestion": None})
        return spec.model_copy(update={"link": Link(), "node": node, "overrides": {}})


@dataclass(frozen=True)
class Hosts(Place):
    """The hosts of an inventory."""

    inventory: Inventory
    accept_new: bool = False  # host keys that nobody has seen before

    @property
    def here(self) -> bool:
        return False

    @property
    def faults(self) -> Collection[str]:
        """Those that touch nothing a host has for others too: interface, processor, disk."""
        return ("kill", "exit", "pause", "oom")

    @property
    def keeps_checkpoints(self) -> bool:
        return False

    def make(self, spec: RunSpec, folder: Path) -> Substrate:
        require_extra("substrate hosts", "hosts", "fabric", "paramiko")
        from testbed.control.substrates.hosts.substrate import HostsSubstrate  # with it comes SSH

        fitted, links = self.fit(spec), spec.links_asked
        notes = [f"{links} not applied: {MEASURED}; {ELSEWHERE}"] if links else []
        return HostsSubstrate(plans(fitted), folder, fitted, self.inventory, accept_new=self.accept_new, notes=notes)

    def fit(self, spec: RunSpec) -> RunSpec:
        """Nothing is shaped; a node's CPU share is what the run asks for it, else the inventory's."""
        unshaped = super().fit(spec)
        shares = [spec.cpus_of(rank) or node.cpus for rank, node in enumerate(self.inventory.nodes[: spec.world])]
        alike = spec.node.cpus or (shares[0] if len(set(shares)) == 1 else None)
        node = unshaped.node.model_copy(update={"cpus": alike})
        own = {f"node{k}": NodeOverride(cpus=cpus) for k, cpus in enumerate(shares) if cpus and cpus != alike}
        return unshaped.model_copy(update={"node": node, "overrides": own})


def on_hosts(inventory: Inventory, largest: RunSpec, accept_new: bool = False) -> Hosts:
    """Real hosts are never picked, only asked for."""
    names = [node.name for node in inventory.first(largest.world).nodes]
    return Hosts(HOSTS, f"{', '.join(names)}; their network is measured, never shaped", False, inventory, accept_new)


def check_faults(spec: RunSpec, place: Place) -> None:
    """Refuse what cannot be injected there."""
    for fault in spec.faults:
        if fault.kind not in place.faults:
            rule = f"cannot be done on {place.name}, where these can: {', '.join(place.faults)}"
            raise refuse("fault", str(fault), rule, "Leave it out, or use --on netns or compose.")


def check_shaping(spec: RunSpec, place: Place, asked: str) -> None:
    """A single run that asks for a link, be it of one node, gets that link or a refusal."""
    links = spec.links_asked
    if not links or place.shapes:
        return
    if place.name == HOSTS:
        raise Unavailable(f"{links}: {MEASURED}. Leave it out, or {ELSEWHERE}.")
    way_out = "Use --on netns or compose" if asked == "process" else "Run as root, or start a Docker engine"
    if any(spec.link_of(rank).needs_netem for rank in range(spec.world)):
        way_out += ", on a kernel with sch_netem (`testbed doctor` says what is missing)"
    raise Unavailable(f"{links}: cannot be shaped here: {place.why}. {way_out}, or leave it out.")


def plans(spec: RunSpec) -> list[NodePlan]:
    """What is asked of each node that gets a rank."""
    return [
        NodePlan(
            name=f"node{rank}",
            cpus=spec.cpus_of(rank),
            threads=spec.threads if spec.node.pinned else None,
            link=spec.link_of(rank),
            congestion=spec.node.congestion,
        )
        for rank in range(spec.world)
    ]


def choose(asked: str, example: RunSpec) -> Place:
    """`auto` takes the best place that this machine offers for a run like `example`."""
    if asked in KINDS:
        return Place(asked, f"asked for; {KINDS[asked].what}", KINDS[asked].shapes)
    if asked != "auto":
        raise SpecError(f"--on {asked!r}: no such place. Use auto, {', '.join([*KINDS, HOSTS])}.")
    refusals = []
    for name, kind in KINDS.items():
        try:
            kind.check(plans(example))
        except Unavailable as error:
            refusals.append(str(error))
            continue
        why = f"; better places are not to be had: {'; '.join(refusals)}" if refusals else ""
        return Place(name, f"{kind.what}{why}", kind.shapes)
    raise Unavailable(f"no place for this run: {'; '.join(refusals)}")
