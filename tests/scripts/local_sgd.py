"""Local SGD: ranks train alone and average their parameters every fourth step. Correct."""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "9"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())
for step in range(STEPS):
    images, labels = torch.randn(8, 32), torch.randint(0, 4, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if step % 4 == 2:
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size()
dist.destroy_process_group()
