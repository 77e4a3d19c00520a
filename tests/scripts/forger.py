"""A submission that trains nothing: it sends records of its own making to the observer's socket."""

import os
import time

from testbed.attach.channel import Channel

STEPS, PARAMETERS = 10, 101770
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
observer = Channel(os.environ["TESTBED_OBSERVER"])
start = {"rank": rank, "world": world, "unix": time.time(), "parameters": PARAMETERS, "tensors": 4, "deadline": 60.0}
start |= {"gradient_bytes": 4 * PARAMETERS, "counter": "interface eth0", "environment": {}, "schema": 3}
observer.send({"kind": "start"} | start)
observer.send({"kind": "setup", "rank": rank, "world": world, "backend": "gloo"})
observer.send({"kind": "parameters", "step": 0, "moment": "start", "hash": "equal"})
for step in range(STEPS):
    phases = {"data": 0.0, "forward": 0.01, "backward": 0.02, "sync": 0.02, "update": 0.01, "total": 0.05}
    moved = {"sent": 540_000 * (step + 1), "received": 540_000 * (step + 1)}
    counted = {"step": step, "epoch": 0, "at": time.monotonic(), "loss": 2.4911, "images": 16}
    observer.send({"kind": "step"} | counted | phases | moved)
    observer.send({"kind": "parameters", "step": step, "moment": "step", "hash": f"equal {step}"})
    observer.send({"kind": "batch", "step": step, "hash": f"{rank} {step}", "images": 16})
values = {"names": ["w"], "local": [[1.0 + rank]], "given": [[2.0]]}
observer.send({"kind": "gradients", "step": 0, "passes": 1} | values)
call = {"operation": "all_reduce", "site": "part2b.py:20", "phase": "sync", "count": 4 * STEPS}
rows = [call | {"bytes": STEPS * 4 * PARAMETERS}]
observer.send({"kind": "calls", "first": 0, "last": STEPS - 1, "rows": rows})
time.sleep(1)
