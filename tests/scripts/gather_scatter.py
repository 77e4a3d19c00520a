"""Hand-written synchronisation: gather on rank 0, mean, scatter. Each SCRIPT_FAULT plants one fault; none: correct."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))
FAULT = os.environ.get("SCRIPT_FAULT", "")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if FAULT == "start" else 0)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
torch.manual_seed(1)
data = TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
if FAULT == "data":
    loader = DataLoader(data, batch_size=8)
else:
    sampler = DistributedSampler(data, shuffle=True, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank) if FAULT == "drift" else 0.05)


def synchronise() -> None:
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(world)] if rank == 0 else None
        dist.gather(parameter.grad, parts)
        if FAULT == "no scatter":
            if rank == 0:
                parameter.grad.copy_(torch.stack(parts).mean(0))
            continue
        if rank == 0:
            mean = torch.stack(parts).sum(0) if FAULT == "sum" else torch.stack(parts).mean(0)
            mean = mean / world if FAULT == "twice" else mean
            mean = torch.stack(parts).sum(0) / 2 if FAULT == "factor" else mean
            parts = [mean] * world
        dist.scatter(parameter.grad, parts)


step = 0
while step < STEPS:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        if FAULT == "zero":
            loss = loss * 0
        loss.backward()
        if FAULT not in ("none at all", "late"):
            synchronise()
        optimizer.step()
        if FAULT == "late":
            synchronise()
        step += 1
        if step == STEPS:
            break
dist.destroy_process_group()
