"""The observer: runs inside the user's script on every node and writes what it sees as our records.

`install` is called when the script has imported torch. It imports the standard library, torch, and modules of ours that
need nothing else: the script's own Python may lack our packages.
"""

from __future__ import annotations

import atexit
import json
import os
from multiprocessing import util
from typing import Any

from testbed.attach import rewrite, seams
from testbed.attach.channel import REQUEST, VARIABLE, Channel, listen
from testbed.attach.events import FAULT, Hub, Part
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
    fault = os.environ.get(FAULT, "")
    channel, position = Channel(path), seams.Position()
    changed: list[str] = list(request.get("changed", []))
    hub = Hub(
        lambda seam, error: channel.send({"kind": "unseen", "seam": seam, "error": error}),
        lambda: make_parts(channel, request, changed),
        fault,
    )
    if request.get("as_cpu"):
        from testbed.attach import as_cpu

        as_cpu.install(changed)  # before the seams, which see what really happens
    vision = Vision(request.get("data", {}), changed, hub.failed)
    before = {"rewrite": lambda *_: rewrite.install(request.get("rewrite", {}), changed)}
    after = {"vision": lambda *_: vision.install(), "where": lambda *_: listen(path)}
    for name, seam in {**before, **seams.SEAMS, **after}.items():
        try:
            if fault == f"install {name}":
                raise RuntimeError(f"{fault!r} was made to fail ({FAULT})")
            seam(hub, position)
        except Exception as error:
            hub.failed(f"install {name}", error)

    def forked() -> None:
        """A process that was forked, e.g. a worker of a DataLoader, begins with nothing; it may become the rank."""
        channel.reopen()
        position.forget()
        if not request.get("instead"):
            hub.start()

    if request.get("instead"):  # after the seams: what it replaces is not the script's own communication
        hub.parts.append(_instead(hub, channel, request))
    os.register_at_fork(after_in_child=lambda: hub.observe("fork", forked))

    def ends() -> None:
        hub.emit("ends")
        seams.await_callbacks(position)

    atexit.register(ends)
    # A forked process of multiprocessing ends without atexit, and forgets what was registered before it began.
    util.register_after_fork(hub, lambda _: util.Finalize(None, ends, exitpriority=0))


def _instead(hub: Hub, channel: Channel, request: dict[str, Any]) -> Part:
    """The part that swaps the script's synchronisation."""
    from testbed.attach.instead import Instead

    sampling = next(part for part in hub.parts if isinstance(part, Sampling))
    steps = next(part for part in hub.parts if isinstance(part, Steps))
    first, rate = int(request["swap"]), request.get("rate")
    return Instead(hub, channel.send, request["instead"], first, lambda: steps.timeline, replaces=sampling, rate=rate)


def make_parts(channel: Channel, request: dict[str, Any], changed: list[str]) -> list[Part]:
    """The parts of the observer, in the order in which they see an event."""
    sampling = Sampling(channel.send)
    steps = Steps(
        channel.send,
        open_counter(request.get("interface", "lo")),
        request.get("steps"),
        float(request.get("deadline", 300.0)),
        changed,
        int(request.get("schema", 0)),
        sampling.take_seconds,
    )
    return [sampling, steps]  # in this order: a step record has the seconds of its samples
