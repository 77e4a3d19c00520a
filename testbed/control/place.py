"""Place: which substrate a run happens on, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.control.substrates.netns import check as check_netns
from testbed.control.substrates.process import ProcessSubstrate
from testbed.spec.errors import SpecError, Unavailable
from testbed.spec.link import Link
from testbed.spec.run import RunSpec


@dataclass(frozen=True)
class Kind:
    """One kind of place: how it is made, whether this machine has it, and what it is in words."""

    make: Callable[[Sequence[NodePlan], Path], Substrate]
    check: Callable[[Sequence[NodePlan]], None]  # raises Unavailable
    what: str
    shapes: bool = True


def _compose(plans: Sequence[NodePlan], folder: Path) -> Substrate:
    from testbed.control.substrates.compose import ComposeSubstrate  # the engine's SDK takes a while to import

    return ComposeSubstrate(plans, folder)


def _check_compose(plans: Sequence[NodePlan]) -> None:
    from testbed.control.substrates.engine import check

    check(plans)


KINDS: dict[str, Kind] = {  # best first
    "compose": Kind(_compose, _check_compose, "one container per node, shaped both ways"),
    "netns": Kind(NetnsSubstrate, check_netns, "network namespaces, shaped both ways"),
    "process": Kind(ProcessSubstrate, lambda plans: None, "plain processes on loopback, unshaped, no CPU limit", False),
}


@dataclass(frozen=True)
class Place:
    """A substrate by name, and the sentence that says why it was picked."""

    name: str
    why: str
    shapes: bool

    def make(self, spec: RunSpec, folder: Path) -> Substrate:
        return KINDS[self.name].make(plans(spec), folder)

    def fit(self, spec: RunSpec) -> RunSpec:
        """The run as this place can do it: where nothing is shaped, no rate stands in the spec."""
        if self.shapes:
            return spec
        node = spec.node.model_copy(update={"cpus": None, "congestion": None})
        return spec.model_copy(update={"link": Link(), "node": node, "overrides": {}})


def plans(spec: RunSpec) -> list[NodePlan]:
    """What is asked of each node that gets a rank."""
    return [_plan(spec, f"node{k}") for k in range(spec.world)]


def _plan(spec: RunSpec, name: str) -> NodePlan:
    own = spec.overrides.get(name)
    return NodePlan(
        name=name,
        cpus=own.cpus if own and own.cpus else spec.node.cpus,
        link=own.link if own and own.link else spec.link,
        congestion=spec.node.congestion,
    )


def choose(asked: str, example: RunSpec) -> Place:
    """`auto` takes the best place that this machine offers for a run like `example`."""
    if asked in KINDS:
        return Place(asked, f"asked for; {KINDS[asked].what}", KINDS[asked].shapes)
    if asked != "auto":
        raise SpecError(f"--on {asked!r}: no such place. Use auto, {', '.join(KINDS)}.")
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
