"""FSDP: each rank has a shard of the parameters. Correct."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for _ in range(STEPS):
    images, labels = torch.randn(8, 32), torch.randint(0, 4, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
dist.destroy_process_group()
