"""The observer: runs inside the user's script on every node and sends records of the script's events to the launcher.

`install` is called when the script has imported torch. This module imports the standard library, torch, and only those
modules of the testbed that need nothing else, because the script's Python may lack the testbed's packages.
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
    """Install every seam if the launcher requests it. Report a seam that cannot be installed; the others work."""
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

        as_cpu.install(changed)  # before the seams, so that they report the devices and backends that are used
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
        """Begin without records in a forked process. It may be a worker of a DataLoader, or become the rank."""
        channel.reopen()
        position.forget()
        if not request.get("instead"):
            hub.start()

    if request.get("instead"):  # after the seams, so that they do not report replaced collectives
        hub.parts.append(_instead(hub, channel, request))
    os.register_at_fork(after_in_child=lambda: hub.observe("fork", forked))

    def ends() -> None:
        hub.emit("ends")
        seams.await_callbacks(position)

    atexit.register(ends)
    # A process that multiprocessing has forked runs no atexit functions and no finalizers of its parent.
    util.register_after_fork(hub, lambda _: util.Finalize(None, ends, exitpriority=0))


def _instead(hub: Hub, channel: Channel, request: dict[str, Any]) -> Part:
    """Return the part that replaces the script's synchronisation by a mode."""
    from testbed.attach.instead import Instead

    sampling = next(part for part in hub.parts if isinstance(part, Sampling))
    steps = next(part for part in hub.parts if isinstance(part, Steps))
    first, rate = int(request["swap"]), request.get("rate")
    return Instead(hub, channel.send, request["instead"], first, lambda: steps.timeline, replaces=sampling, rate=rate)


def make_parts(channel: Channel, request: dict[str, Any], changed: list[str]) -> list[Part]:
    """Return the parts of the observer, in the order in which the hub calls them."""
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
    return [sampling, steps]  # sampling first: the step record has the seconds that its samples took
