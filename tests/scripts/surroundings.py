"""Writes what a script can reach from where it runs to its output, as JSON, and takes two steps with two workers."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def can_write(folder: str) -> bool:
    try:
        (Path(folder) / "trial").write_text("x")
    except OSError:
        return False
    return True


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
print(
    json.dumps(
        {
            "uid": os.getuid(),
            "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapBnd"], 16),
            "no_new_privileges": status["NoNewPrivs"],
            "writes": [folder for folder in ("/", "/etc", "/script", "/data", "/opt/testbed") if can_write(folder)],
            "internet": can_connect("192.0.2.1", 80),
            "name": can_connect("example.com", 80),
            "runs": sorted(path.name for path in Path("/runs").glob("*")),
            "tmp_bytes": shutil.disk_usage(os.environ["TMPDIR"]).total,
            "shm_bytes": shutil.disk_usage("/dev/shm").total,
            "variables": sorted(os.environ),
            "given": Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else "",
        }
    )
)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(24, 1024), torch.randint(0, 10, (24,)))
for images, labels in DataLoader(data, batch_size=8, num_workers=2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
Path("written.txt").write_text("kept")
dist.destroy_process_group()
