"""Rounds of messages on a star of links, simulated by SimGrid: an oracle for testbed/predict/collectives.py.

It runs under the interpreter that Debian's python3-simgrid belongs to, so it imports nothing of this project. It reads
a case as JSON from stdin and prints the seconds that the last rank needs:

    nodes, rate (byte/s of each link, each way), latency (s, one way)
    racks    the nodes of each rack, which share an uplink of `uplink` byte/s each way; empty: one switch
    rounds   for each round [sender, receiver, bytes] of each message
    parts    segments of each message

A rank sends a segment when it has received the same segment of the round before; a message of one segment also waits
until those before have arrived. Each message shares up- and downlink with the others as SimGrid's fluid model has it
(max-min fairness).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, Mailbox, NetZone, Semaphore, this_actor

# The fluid model without the factors that SimGrid fits to TCP: acknowledgements take nothing, bytes take S/B.
CONFIG = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0")


def platform(case: dict[str, Any]) -> list[Any]:
    """A host for each node, each with a link up and one down, and the same for each rack."""
    nodes, racks = case["nodes"], case["racks"]
    zone = NetZone.create_full_zone("star")
    hosts = [zone.create_host(f"node{k}", 1e9) for k in range(nodes)]

    def links(name: str, count: int, rate: float, latency: float = 0.0) -> list[Any]:
        return [zone.create_link(f"{name}{k}", rate).set_latency(latency).seal() for k in range(count)]

    up, down = links("up", nodes, case["rate"], case["latency"]), links("down", nodes, case["rate"])
    leaving, entering = (links(name, len(racks), case["uplink"]) for name in ("leaving", "entering"))
    rack_of = {node: number for number, rack in enumerate(racks) for node in rack}
    for a in range(nodes):
        for b in range(nodes):
            if a != b:
                across = rack_of.get(a) != rack_of.get(b)
                between = [leaving[rack_of[a]], entering[rack_of[b]]] if across else []
                route = [LinkInRoute(link) for link in (up[a], *between, down[b])]
                zone.add_route(hosts[a].netpoint, hosts[b].netpoint, None, None, route, False)
    zone.seal()
    return hosts


class Rank:
    """One actor that sends, and one that receives."""

    def __init__(self, number: int, case: dict[str, Any]) -> None:
        self.parts, self.rate = case["parts"], case["rate"]
        self.sends = [[m for m in round_ if m[0] == number] for round_ in case["rounds"]]
        self.receives = [[m for m in round_ if m[1] == number] for round_ in case["rounds"]]
        self.here = [[Semaphore(0) for _ in range(self.parts)] for _ in case["rounds"]]  # what a round has brought

    def send(self) -> None:
        sent = []
        for number, messages in enumerate(self.sends):
            for part in range(self.parts):
                if number:
                    self.here[number - 1][part].acquire()
                boxes = [Mailbox.by_name(name_of(number, part, message)) for message in messages]
                sizes = [size / self.parts for *_, size in messages]
                sent += [box.put_async("segment", round(size)) for box, size in zip(boxes, sizes, strict=True)]
                if self.parts > 1:  # the next segment follows as soon as the link is free
                    this_actor.sleep_for(sum(sizes) / self.rate)
                else:
                    Comm.wait_all(sent)
                    sent = []
        Comm.wait_all(sent)

    def receive(self) -> None:
        # A message of SimGrid begins when its receiver expects it, so all are expected from the beginning. What
        # get_async returns has to live until its message is there.
        coming = [
            [[Mailbox.by_name(name_of(number, part, m)).get_async() for m in messages] for part in range(self.parts)]
            for number, messages in enumerate(self.receives)
        ]
        for number, parts in enumerate(coming):
            for part, found in enumerate(parts):
                Comm.wait_all([comm for comm, _ in found])
                self.here[number][part].release()


def name_of(number: int, part: int, message: list[Any]) -> str:
    sender, receiver, _ = message
    return f"{number} {part} {sender} {receiver}"


def main() -> None:
    case = json.load(sys.stdin)
    engine = Engine([sys.argv[0], *(f"--cfg={each}" for each in CONFIG), "--log=root.thres:warning"])
    hosts = platform(case)
    for number, host in enumerate(hosts):
        rank = Rank(number, case)
        Actor.create(f"send{number}", host, rank.send)
        Actor.create(f"receive{number}", host, rank.receive)
    engine.run()
    print(json.dumps(engine.clock))


if __name__ == "__main__":
    main()
