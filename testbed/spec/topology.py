"""Topology: which nodes share a rack, and the uplink between racks.

    [topology]
    racks = [[0, 1], [2, 3]]
    uplink = "200mbit"

A ring goes 0 -> 1 -> ... -> N-1 -> 0, wherever the nodes are: with these racks it passes each uplink once each way,
with racks = [[0, 2], [1, 3]] twice. So other racks are how another order of the ranks is requested.

`racks` alone changes no network: it tells the algorithm `hierarchical` which ranks are near each other, e.g. on real
hosts.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from testbed.spec.base import Spec
from testbed.spec.fabric import Racks
from testbed.spec.link import Duration, Link, Rate
from testbed.spec.units import format_duration, format_rate
from testbed.spec.words import refuse_setting, setting

EXAMPLE = [[0, 1], [2, 3]]
_Node = Annotated[int, Field(ge=0, le=255)]
_Rack = Annotated[tuple[_Node, ...], Field(min_length=1)]


class Topology(Spec):
    """Racks of nodes and their uplinks; every value of an uplink holds for each rack and each direction."""

    racks: tuple[_Rack, ...] = Field(default=(), examples=[EXAMPLE])
    uplink: Rate | None = Field(default=None, examples=["200mbit"])  # bit/s on the wire; None: no limit
    # one way from rack to rack, in addition to the links' delays; needs netem
    delay: Duration | None = Field(default=None, examples=["5ms"])

    @model_validator(mode="after")
    def _check_racks(self) -> Topology:
        for key, value in (
            ("uplink", self.uplink and format_rate(self.uplink)),
            ("delay", self.delay and format_duration(self.delay)),
        ):
            if value and not self.racks:
                way_out = f"Add e.g. {setting('topology.racks', EXAMPLE)}, or leave it out."
                raise ValueError(
                    refuse_setting(f"topology.{key}", value, "is between racks, and there are none", way_out)
                )
        nodes = [node for rack in self.racks for node in rack]
        twice = sorted({node for node in nodes if nodes.count(node) > 1})
        if twice:
            rule = f"node {twice[0]} is in more than one place"
            raise ValueError(refuse_setting("topology.racks", as_lists(self.racks), rule, "Name each node once."))
        return self

    @property
    def trunk(self) -> Link | None:
        """The link of each rack to the others; None if nothing is requested of it, or nothing passes it."""
        if len(self.racks) < 2 or (self.uplink is None and self.delay is None):
            return None
        return Link(rate=self.uplink, delay=self.delay)

    @property
    def requested(self) -> str:
        """The uplink in words; empty if nothing is requested of it."""
        return f"uplink {self.trunk.model_dump_json(exclude_defaults=True)} between racks" if self.trunk else ""


def as_lists(racks: Racks) -> list[list[int]]:
    """As a user writes them."""
    return [list(rack) for rack in racks]


def missing_or_unknown(racks: Racks, nodes: int) -> str:
    """Why these racks do not hold the nodes of a run; empty if they do."""
    named = {node for rack in racks for node in rack}
    unknown, missing = sorted(named - set(range(nodes))), sorted(set(range(nodes)) - named)
    if unknown:
        return f"there is no node {unknown[0]}: {nodes} nodes are 0 to {nodes - 1}"
    return f"node {missing[0]} is in no rack, and there are {nodes} nodes" if missing else ""
