"""Gradients that are averaged by hand and clipped to a norm, by torch or by the script's own code. Correct."""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))
BY_HAND = "by hand" in os.environ.get("SCRIPT_CLIPS", "")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())
for _ in range(STEPS):
    images, labels = torch.randn(8, 32), torch.randint(0, 4, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    if BY_HAND:
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.1 / norm.item())
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
dist.destroy_process_group()
