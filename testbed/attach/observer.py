"""The observer: runs inside the user's script on every node and writes what it sees as our records.

`install` is called when the script has imported torch. It imports the standard library, torch, and modules of ours that
need nothing else: the script's own Python may lack our packages.
"""

from __future__ import annotations

import atexit
import json
import os
from typing import Any

from testbed.attach import rewrite, seams, where
from testbed.attach.channel import REQUEST, VARIABLE, Channel
from testbed.attach.events import Hub
from testbed.attach.sampling import Sampling
from testbed.attach.steps import Steps
from testbed.attach.vision import Vision
from testbed.rank.counters import open_counter


def install() -> None:
    """Install every seam. A seam that cannot be installed is reported; the others work."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    request: dict[str, Any] = json.loads(os.environ.get(REQUEST, "{}"))
    channel = Channel(path)
    hub = Hub(lambda seam, error: channel.send({"kind": "unseen", "seam": seam, "error": error}))
    counter = open_counter(request.get("interface", "lo"))
    changed = list(request.get("changed", []))
    sampling = Sampling(channel.send)
    steps = Steps(
        channel.send,
        counter,
        request.get("steps"),
        float(request.get("deadline", 300.0)),
        changed,
        int(request.get("schema", 0)),
        sampling.take_seconds,
    )
    hub.parts += [sampling, steps]  # in this order: a step record has the seconds of its samples
    position = seams.Position()
    for seam, arguments in (
        (rewrite.install, (request.get("rewrite", {}), changed)),
        (seams.watch_group, (hub,)),
        (seams.watch_collectives, (hub, position)),
        (seams.watch_waits, (hub,)),
        (seams.watch_backward, (hub, position)),
        (seams.watch_optimizers, (hub, position)),
        (seams.watch_data, (hub, position)),
        (seams.watch_wrappers, (hub,)),
        (Vision(request.get("data", {}), changed, hub.failed).install, ()),
        (seams.watch_optimizers_made, (hub,)),
        (seams.watch_samplers, (hub,)),
        (seams.watch_clipping, (hub,)),
        (where.listen, (path,)),
    ):
        try:
            seam(*arguments)
        except Exception as error:
            hub.failed(seam.__name__, error)
    if request.get("instead"):  # after the seams: what it replaces is not the script's own communication
        from testbed.attach.instead import Instead

        first = int(request["swap"])
        swap = Instead(hub, channel.send, request["instead"], first, lambda: steps.timeline, replaces=sampling)
        hub.parts.append(swap)
    atexit.register(hub.emit, "ends")
