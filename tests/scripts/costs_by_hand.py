"""Costs of a correct script without DDP: no overlap, small collectives, and rank 0 evaluates alone for long."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "16"))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(1 + rank)
statistics = [torch.zeros(16) for _ in range(64)]


@torch.no_grad()
def evaluate():
    model.eval()
    model(torch.zeros(8, 1024))
    time.sleep(0.5)  # a slow test set
    model.train()


for step in range(STEPS):
    if rank == 0 and step % 3 == 2:
        evaluate()
    optimizer.zero_grad()
    images, labels = torch.randn(1536, 1024, generator=draw), torch.randint(0, 10, (1536,), generator=draw)
    nn.functional.cross_entropy(model(images), labels).backward()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter) / world)
    for each in statistics:
        dist.all_reduce(each)
    optimizer.step()
dist.destroy_process_group()
