"""A DDP script that writes files and ends badly on one rank: argv[1] says how, argv[2] on which rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how, where = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
subprocess.Popen(["sleep", "3600"], start_new_session=True)  # must not outlive the run
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    with Path("steps.txt").open("a") as file:
        file.write(f"rank {rank} step {step}\n")
    if step == 3 and rank == where:
        if how == "raise":
            sys.stdout.buffer.write(bytes(range(256)))
            sys.stdout.flush()
            raise ValueError(f"rank {rank} stops here")
        if how == "exit":
            sys.exit(7)
        if how == "hang":
            time.sleep(3600)
        if how == "kill":
            os.abort()
