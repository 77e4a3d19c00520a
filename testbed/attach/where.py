"""Answer where the script is: for the message on a script that makes no step.

The launcher asks through the observer's socket; a thread that otherwise sleeps answers with the line of the script that
the main thread is in, and whether torch waits there for other ranks.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from types import FrameType
from typing import Any

from testbed.attach.events import OURS, is_library

READY = {"kind": "asks"}  # what a connection sends that wants to be asked
QUESTION = b"where\n"
MAX_DEPTH = 200


def listen(path: str) -> None:
    """Connect to the launcher and answer its questions in a thread. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(json.dumps(READY).encode() + b"\n")
    main = threading.main_thread().ident

    def answer() -> None:
        try:
            while connection.recv(len(QUESTION)):
                frame = sys._current_frames().get(main or 0)
                connection.sendall(json.dumps(position(frame)).encode() + b"\n")
        except OSError:
            return

    threading.Thread(target=answer, name="testbed-where", daemon=True).start()


def position(frame: FrameType | None) -> dict[str, Any]:
    """The record of where a thread is: the innermost line that is the script's own, and whether torch waits there."""
    waits, site, depth = False, "", 0
    while frame is not None and depth < MAX_DEPTH and not site:
        path = frame.f_code.co_filename
        if not path.startswith((OURS, "<")) and not is_library(path):
            site = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        # backward() waits inside torch for DDP's reductions
        waits = waits or "/torch/distributed/" in path or "/torch/autograd/" in path
        frame, depth = frame.f_back, depth + 1
    return {"kind": "where", "site": site, "waits": waits}
