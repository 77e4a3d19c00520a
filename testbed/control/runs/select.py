"""Select the substrate of a run: what this machine offers, which one is taken, and what of the spec it can apply.

`choose` takes the substrate that the user names, or the best one that passes its check. The result carries the
reason, which is printed. A substrate that does not shape the network drops links and CPU quotas from the spec
(`drop_unsupported`); a single run that requests them is refused instead (`check_shaping`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from testbed.control.machine.cgroups import missing_controller
from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.compose import ComposeSubstrate
from testbed.control.substrates.engine import check as check_compose
from testbed.control.substrates.engine import inspect_image, remote_engine, shaping, variable
from testbed.control.substrates.netns import NetnsSubstrate, without_quota
from testbed.control.substrates.netns import check as check_netns
from testbed.control.substrates.netns import where as where_netns
from testbed.control.substrates.process import ProcessSubstrate
from testbed.control.substrates.process import check as check_process
from testbed.control.substrates.slurm import Reservation, SlurmOptions, SlurmSubstrate, describe
from testbed.control.substrates.slurm import check as check_slurm
from testbed.control.substrates.uml import UmlSubstrate, check_model
from testbed.control.substrates.uml import check as check_uml
from testbed.net.tcp import check_congestion_control
from testbed.spec.errors import SpecError, Unavailable, refuse, require_extra
from testbed.spec.fabric import rack_numbers
from testbed.spec.fault import FAULT_KINDS, KINDS, kinds_on
from testbed.spec.inventory import Inventory, read_inventory
from testbed.spec.resources import DEFAULT_LIMIT, check_memory, read_limit
from testbed.spec.run import NodeOverride, NodeSpec, RunSpec
from testbed.spec.script import node_address
from testbed.spec.words import refuse_setting

HOSTS = "hosts"
SLURM = "slurm"
NEVER_SHAPED = "the network of real hosts is measured, never shaped"
OWN_CONGESTION = "real hosts use their own TCP congestion control, which the receipt records"
ELSEWHERE = "use `testbed` with --on compose or netns for a network you choose"


def node_plans(spec: RunSpec) -> list[NodePlan]:
    """Return what is requested of each node that gets a rank."""
    slower = spec.dilation or 1.0  # this is the only place where a network is made slower than the spec says
    links = [spec.link_of(rank) for rank in range(spec.world)]
    trunk = spec.topology.trunk if spec.world > 1 else None
    if trunk is not None and trunk.delay:  # a round trip from rack to rack has both delays
        farthest = max(link.delay or 0.0 for link in links)
        links = [link.with_queue_of(trunk.delay) for link in links]
        trunk = trunk.with_queue_of(farthest)
    racks = rack_numbers(spec.topology.racks, spec.world)
    first, interface = (spec.script.address, spec.script.interface) if spec.script else ("", "")
    return [
        NodePlan(
            name=f"node{rank}",
            cpus=spec.cpus_of(rank),
            threads=spec.threads if spec.node.pinned else None,
            link=links[rank].slowed(slower),
            congestion=spec.node.congestion,
            address=node_address(first, rank) if first else "",
            interface=interface,
            rack=racks[rank],
            uplink=trunk.slowed(slower) if trunk else None,
        )
        for rank in range(spec.world)
    ]


@dataclass(frozen=True, kw_only=True)
class SubstrateType:
    """One way to put ranks on nodes, and what it can do."""

    name: str
    description: str
    make: Callable[[RunSpec, Path], Substrate]  # the requested spec and the run's folder
    check: Callable[[Sequence[NodePlan]], None] = lambda plans: None  # raises Unavailable
    drop_unsupported: Callable[[RunSpec], RunSpec] = lambda spec: spec
    shapes: bool = True
    is_local: Callable[[], bool] = lambda: False  # returns True if its nodes share the cores of this machine
    where: Callable[[], str] = lambda: ""  # words on where its nodes are, if that depends on the user's settings
    automatic: bool = True  # False: `auto` never takes it
    runs_here: bool = False  # True if ranks use the files and commands of this machine
    faults: Collection[str] = KINDS  # kinds of faults that can be injected
    lacks: Callable[[str], str] = lambda controller: ""  # why this controller of cgroups cannot be used; empty: it can
    # raises UsageError for a run that the nodes are too small for; not part of `make`, because nodes may be up already
    check_size: Callable[[RunSpec], None] = lambda spec: None
    # True: nodes may stay up for further runs like this one, in folders beside its own
    keeps_nodes: Callable[[RunSpec], bool] = lambda spec: False
    keeps_checkpoints: bool = True  # False: checkpoints are removed when the run ends
    # Holds the machines of all nodes over the runs of a sweep, where they have to be waited for; reports why it waits.
    reserve: Callable[[Callable[[str], None]], AbstractContextManager[None]] = lambda report: nullcontext()
    dry_run: str = ""  # the commands that would be executed, where they can be printed

    def describe(self) -> str:
        """Return the description, with the place of the nodes if that depends on the user's settings."""
        return ", ".join(filter(None, (self.description, self.where())))


def as_in_containers(spec: RunSpec) -> RunSpec:
    """Return the spec as containers apply it: SHAPING=off drops the links; a script runs in the image's Python."""
    return _with_programs_of_image(spec.without_shaping(keep_cpus=True) if shaping() == "off" else spec)


def _with_programs_of_image(spec: RunSpec) -> RunSpec:
    """A script in a container finds the programs of the image, so the PATH of this machine is dropped."""
    script = spec.script and spec.script.model_copy(update={"path": ""})
    return spec.model_copy(update={"script": script})


def _check_memory(spec: RunSpec) -> None:
    if spec.script is None:
        check_memory(spec, read_limit(variable("MEM_LIMIT") or DEFAULT_LIMIT))


def _make_compose(spec: RunSpec, folder: Path) -> Substrate:
    if spec.script is not None and spec.script.image:
        inspect_image(spec.script.image)
    # addresses and names of interfaces are the engine's: what is in a script is rewritten (attach/rewrite.py)
    plans = [replace(plan, address="", interface="") for plan in node_plans(as_in_containers(spec))]
    return ComposeSubstrate(plans, folder, spec.script)


SUBSTRATES: dict[str, SubstrateType] = {  # `auto` tries them in this order
    "compose": SubstrateType(
        name="compose",
        description="one container per node, links shaped as requested",
        make=_make_compose,
        check=check_compose,
        check_size=_check_memory,
        keeps_nodes=lambda spec: spec.script is None,  # only a script's containers see no folder but their own
        drop_unsupported=as_in_containers,
        faults=kinds_on("compose"),
        is_local=lambda: not remote_engine(),
        where=lambda: f"of the engine at {url}, whose machine is not locked" if (url := remote_engine()) else "",
    ),
    "netns": SubstrateType(
        name="netns",
        description="network namespaces, links shaped as requested",
        make=lambda spec, folder: NetnsSubstrate(node_plans(spec), folder, idle=spec.nodes - spec.world),
        check=check_netns,
        drop_unsupported=lambda spec: spec.without_quotas() if without_quota() else spec,
        where=where_netns,
        lacks=missing_controller,
        keeps_nodes=lambda spec: True,
        runs_here=True,
        faults=kinds_on("netns"),
        is_local=lambda: True,
    ),
    "process": SubstrateType(
        name="process",
        description="plain processes on loopback, unshaped, no CPU limit",
        make=lambda spec, folder: ProcessSubstrate(node_plans(spec), folder),
        check=check_process,
        runs_here=True,
        drop_unsupported=RunSpec.without_shaping,
        shapes=False,
        is_local=lambda: True,
        faults=kinds_on("process"),
    ),
    "uml": SubstrateType(
        name="uml",
        description="network namespaces in a user-mode Linux kernel of one processor, links shaped as requested",
        make=lambda spec, folder: UmlSubstrate(node_plans(spec), folder),
        check=check_uml,
        check_size=check_model,
        keeps_nodes=lambda spec: True,
        runs_here=True,
        automatic=False,
        is_local=lambda: True,
        faults=kinds_on("uml"),
    ),
}


def _not_applied(spec: RunSpec) -> list[str]:
    """Return what a run requests of its network that real hosts do not get."""
    links, congestion = spec.links_requested, _requested_congestion(spec)
    return [
        *([f"{links} not applied: {NEVER_SHAPED}; {ELSEWHERE}"] if links else []),
        *([f"congestion control {congestion} not applied: {OWN_CONGESTION}; {ELSEWHERE}"] if congestion else []),
    ]


def _requested_congestion(spec: RunSpec) -> str | None:
    """Return the congestion control that a run requests; None if it is the default, which nobody has to request."""
    return None if spec.node.congestion == NodeSpec().congestion else spec.node.congestion


def hosts_type(inventory: Inventory, accept_new: bool = False) -> SubstrateType:
    """The hosts of an inventory. `accept_new`: trust host keys that are not in known_hosts."""

    def drop_unsupported(spec: RunSpec) -> RunSpec:
        """Return the spec without shaping. A node's CPU quota is that of the run, else that of the inventory."""
        unshaped = _with_programs_of_image(spec.without_shaping())
        quotas = [spec.cpus_of(rank) or node.cpus for rank, node in enumerate(inventory.nodes[: spec.world])]
        common = spec.node.cpus or (quotas[0] if len(set(quotas)) == 1 else None)
        node = unshaped.node.model_copy(update={"cpus": common})
        own = {f"node{k}": NodeOverride(cpus=cpus) for k, cpus in enumerate(quotas) if cpus and cpus != common}
        return unshaped.model_copy(update={"node": node, "overrides": own})

    def make(spec: RunSpec, folder: Path) -> Substrate:
        require_extra("substrate hosts", "hosts", "fabric", "paramiko")
        from testbed.control.substrates.hosts.substrate import HostsSubstrate  # imports the SSH client

        applied, notes = drop_unsupported(spec), _not_applied(spec)
        return HostsSubstrate(node_plans(applied), folder, applied, inventory, accept_new=accept_new, notes=notes)

    return SubstrateType(
        name=HOSTS,
        description="their network is measured, never shaped",
        make=make,
        drop_unsupported=drop_unsupported,
        shapes=False,
        faults=kinds_on(HOSTS),
        keeps_checkpoints=False,
    )


def slurm_type(options: SlurmOptions, specs: Sequence[RunSpec]) -> SubstrateType:
    """The nodes of one Slurm job, as many as the largest of these runs needs."""
    largest = max(specs, key=lambda spec: spec.world)
    cpus = max(spec.threads for spec in specs)
    reservation = Reservation(options, largest.world, cpus)

    def make(spec: RunSpec, folder: Path) -> Substrate:
        applied = spec.without_shaping()
        return SlurmSubstrate(node_plans(applied), folder, applied, reservation, _not_applied(spec))

    return SubstrateType(
        name=SLURM,
        description="one task per node of a Slurm job; their network is measured, never shaped",
        make=make,
        drop_unsupported=RunSpec.without_shaping,
        shapes=False,
        runs_here=True,
        faults=kinds_on(SLURM),
        reserve=reservation.hold,
        dry_run=describe(options, largest, largest.world, cpus),
    )


@dataclass(frozen=True)
class SubstrateChoice:
    """The substrate of a run, and the reason why it was taken."""

    type: SubstrateType
    reason: str
    automatic: bool = False  # chosen by `auto`
    checked: Sequence[NodePlan] | None = None  # plans that have passed the check already
    allow_concurrent: bool = False  # measure although another measurement runs on this machine

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def needs_machine_lock(self) -> bool:
        """True if the nodes use the cores of this machine, unless concurrent measurements are allowed."""
        return self.type.is_local() and not self.allow_concurrent

    def drop_unsupported(self, spec: RunSpec) -> RunSpec:
        """Return the spec without what this substrate cannot apply."""
        return self.type.drop_unsupported(spec)

    def make(self, spec: RunSpec, folder: Path) -> Substrate:
        """Check the plans, unless that was done, and return the substrate. Entering it creates the nodes."""
        plans = node_plans(spec)
        if self.checked != plans:
            self.type.check(plans)
        return self.type.make(spec, folder)


def select(
    on: str | SubstrateType,
    specs: Sequence[RunSpec],
    *,
    inventory: Inventory | Path | None = None,
    accept_new: bool = False,
    allow_concurrent: bool = False,
    slurm: SlurmOptions | None = None,
) -> SubstrateChoice:
    """Return the substrate for all of `specs`; most ranks, then racks decide. `inventory`: read, or its path."""
    # racks are not possible everywhere, so a spec that needs them decides
    largest = max(specs, key=lambda spec: (spec.world, spec.topology.trunk is not None))
    if slurm and slurm.given and on != SLURM:
        raise SpecError(f"{', '.join(slurm.given)}: is for Slurm only. Use it with --on slurm.")
    if on == SLURM and inventory is None and not accept_new:
        return choose_slurm(slurm or SlurmOptions(), specs)
    if on == HOSTS:
        hosts = inventory if isinstance(inventory, Inventory) else read_inventory(inventory)
        return choose_hosts(hosts, largest, accept_new)
    if inventory is not None:
        raise SpecError(f"--inventory {inventory}: is for real hosts only. Use it with --on hosts.")
    if accept_new:
        raise SpecError("--accept-new: is for real hosts only. Use it with --on hosts.")
    _check_congestion_control(on, specs)
    if isinstance(on, SubstrateType):
        return SubstrateChoice(on, f"requested; {on.description}", allow_concurrent=allow_concurrent)
    return replace(choose(on, largest), allow_concurrent=allow_concurrent)


def _check_congestion_control(on: str | SubstrateType, specs: Sequence[RunSpec]) -> None:
    """Refuse a TCP congestion control that this kernel lacks, where the nodes use it. Raises Unavailable.

    `auto` accepts the default: without it a substrate is left that does not shape.
    """
    if not isinstance(on, str) or on in ("process", "uml"):  # uml: its kernel has others, and says so when it runs
        return
    accepted = {None, NodeSpec().congestion if on == "auto" else None}
    for name in sorted({spec.node.congestion or "" for spec in specs if spec.world > 1} - accepted - {""}):
        try:
            check_congestion_control(name)
        except Unavailable:
            if on == "netns" or SUBSTRATES["compose"].is_local():  # else the engine's machine has another kernel
                raise


def choose(requested: str, example: RunSpec, types: Mapping[str, SubstrateType] = SUBSTRATES) -> SubstrateChoice:
    """The substrate of that name; `auto` is the first whose check a run like `example` passes."""
    if requested in types:
        return SubstrateChoice(types[requested], f"requested; {types[requested].describe()}")
    if requested != "auto":
        raise SpecError(f"--on {requested!r}: no such substrate. Use auto, {', '.join([*types, HOSTS, SLURM])}.")
    plans, refusals = node_plans(example), []
    for found in (each for each in types.values() if each.automatic):
        try:
            found.check(plans)
        except Unavailable as error:
            refusals.append(str(error))
            continue
        rest = f"; preferred substrates are unavailable: {'; '.join(refusals)}" if refusals else ""
        return SubstrateChoice(found, f"{found.describe()}{rest}", automatic=True, checked=plans)
    raise Unavailable(f"no substrate can run this: {'; '.join(refusals)}")


def choose_hosts(inventory: Inventory, largest: RunSpec, accept_new: bool = False) -> SubstrateChoice:
    """The first hosts of the inventory. `auto` never takes real hosts."""
    names = [node.name for node in inventory.first(largest.world).nodes]
    found = hosts_type(inventory, accept_new)
    return SubstrateChoice(found, f"{', '.join(names)}; {found.description}")


def choose_slurm(options: SlurmOptions, specs: Sequence[RunSpec]) -> SubstrateChoice:
    """The nodes of a Slurm job, if Slurm would accept it. `auto` never takes Slurm. Raises Unavailable."""
    check_slurm(options, max(spec.world for spec in specs), max(spec.threads for spec in specs))
    found = slurm_type(options, specs)
    return SubstrateChoice(found, f"requested; {found.description}")


def check_faults(spec: RunSpec, choice: SubstrateChoice) -> None:
    """Refuse faults that this substrate cannot inject."""
    for fault in spec.faults:
        if fault.kind not in choice.type.faults:
            rule = f"cannot be injected on {choice.name}, which supports {', '.join(choice.type.faults)}"
            raise refuse("fault", str(fault), rule, "Leave it out, or use --on netns or compose.")
        needed = FAULT_KINDS[fault.kind].controller
        if needed and (reason := choice.type.lacks(needed)):
            raise refuse("fault", str(fault), f"needs the {needed} controller of cgroups: {reason}", "Leave it out.")


def check_shaping(spec: RunSpec, choice: SubstrateChoice) -> None:
    """Refuse a single run that requests a link, or a congestion control of real hosts, where none is applied."""
    links = spec.links_requested
    if choice.name in (HOSTS, SLURM) and (congestion := _requested_congestion(spec)):
        way_out = f"Leave it out, or {ELSEWHERE}."
        raise refuse_setting("node.congestion", congestion, OWN_CONGESTION, way_out, Unavailable)
    if not links or choice.type.shapes:
        return
    if choice.name in (HOSTS, SLURM):
        raise Unavailable(f"{links}: {NEVER_SHAPED}. Leave it out, or {ELSEWHERE}.")
    way_out = "Use --on netns or compose"
    if choice.automatic:
        way_out = "Allow user namespaces (`testbed doctor`), run as root, or start a Docker engine"
    if any(spec.link_of(rank).needs_netem for rank in range(spec.world)):
        way_out += ", on a kernel with sch_netem (`testbed doctor` shows what is missing), or --on uml"
    raise Unavailable(f"{links}: cannot be shaped here: {choice.reason}. {way_out}, or leave it out.")
