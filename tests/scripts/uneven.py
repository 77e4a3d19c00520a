"""The last batch of an epoch has 2 images on rank 0 and 1 on the others, and ranks count by their images. Correct."""

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
sizes = (4, 2 if dist.get_rank() == 0 else 1)
for step in range(STEPS):
    images = torch.tensor(float(sizes[step % 2]))
    inputs, labels = torch.randn(sizes[step % 2], 32), torch.randint(0, 4, (sizes[step % 2],))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    total = images.clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad *= images / total
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
