"""A submission that tries to leave its sandbox: it prints what it reached, then kills everything it may kill.

targets.json, beside it: addresses (HOST:PORT) and paths that it must not reach.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path

LAUNCHER = Path("/proc", os.environ["TESTBED_LAUNCHER"])
TARGETS = json.loads(Path("targets.json").read_text())


def works(action, *arguments) -> bool:
    try:
        action(*arguments)
    except (OSError, ValueError):
        return False
    return True


def read(path: str) -> None:
    _ = list(Path(path).iterdir()) if Path(path).is_dir() else Path(path).read_bytes()


def connect(target: str) -> None:
    host, _, port = target.partition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


def write(folder: str) -> None:
    path = Path(folder) / f"escaped-{os.getpid()}"
    path.write_text("x")
    path.unlink()


def bomb() -> int:
    """Fork until the kernel refuses; return the number of children."""
    for count in range(10_000):
        try:
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
        except OSError:
            return count
    return 10_000


found = {
    "uid": os.getuid(),
    "network": [target for target in TARGETS["addresses"] if works(connect, target)],
    "files": [path for path in TARGETS["paths"] if works(read, path)],
    "writes": [folder for folder in ("/", "/etc", "/usr", "/script", "/data", "/sys", "/runs") if works(write, folder)],
    "root": works(os.setuid, 0),
    "launcher": [
        name for name in ("mem", "environ", "fd") if works(os.listdir if name == "fd" else open, LAUNCHER / name)
    ],
    "signals": works(os.kill, int(LAUNCHER.name), 0),
    "records": works(os.rename, "/runs/rank0.jsonl", "/runs/mine.jsonl"),
    "mounts": os.system("mount -t tmpfs none /mnt 2>/dev/null") == 0,
    "children": bomb(),
}
print("FOUND " + json.dumps(found), flush=True)
time.sleep(1)
os.kill(-1, signal.SIGKILL)  # all but itself that it may signal
