"""A DDP script whose step is almost all communication: SCRIPT_PARAMETERS numbers are summed."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Linear(1000, int(os.environ.get("SCRIPT_PARAMETERS", "2000000")) // 1000, bias=False)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(int(os.environ.get("SCRIPT_STEPS", "100"))):
    optimizer.zero_grad()
    model(torch.randn(1, 1000)).mean().backward()
    optimizer.step()
