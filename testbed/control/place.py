"""Place: which substrate a run happens on, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.control.substrates.netns import check as check_netns
from testbed.control.substrates.process import ProcessSubstrate
from testbed.spec.errors import SpecError, Unavailable
from testbed.spec.link import Link
from testbed.spec.run import RunSpec

SUBSTRATES: dict[str, Callable[[Sequence[NodePlan]], Substrate]] = {
    "netns": NetnsSubstrate,
    "process": ProcessSubstrate,
}


@dataclass(frozen=True)
class Place:
    """A substrate by name, and the sentence that says why it was picked."""

    name: str
    why: str
    shapes: bool

    def make(self, spec: RunSpec) -> Substrate:
        return SUBSTRATES[self.name](plans(spec))

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
    if asked == "process":
        return Place("process", "asked for; plain processes on loopback, unshaped, no CPU limit", shapes=False)
    if asked == "netns":
        return Place("netns", "asked for; network namespaces, shaped both ways", shapes=True)
    if asked != "auto":
        raise SpecError(f"--on {asked!r}: no such place. Use auto, {', '.join(SUBSTRATES)}.")
    try:
        check_netns(plans(example))
    except Unavailable as error:
        return Place("process", f"plain processes on loopback, unshaped, no CPU limit, because {error}", shapes=False)
    return Place("netns", "network namespaces, shaped both ways: the best this machine offers (root, tc)", shapes=True)
