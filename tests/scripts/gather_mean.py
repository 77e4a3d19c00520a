"""Gradients go to rank 0 one by one, their mean comes back by scatter; the loss is summed over the ranks every step.

GRADIENTS=sum: rank 0 adds without dividing. GRADIENTS=none: nothing is synchronised. CLIP=1: the norm is clipped.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, WIDTH = int(os.environ.get("SCRIPT_STEPS", "20")), int(os.environ.get("SCRIPT_WIDTH", "64"))
WAY = os.environ.get("GRADIENTS", "mean")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def synchronise():
    for parameter in model.parameters():
        if rank == 0:
            gathered = [torch.zeros_like(parameter.grad) for _ in range(world)]
            dist.gather(parameter.grad, gathered, dst=0)
            total = torch.stack(gathered).sum(0) if WAY == "sum" else torch.mean(torch.stack(gathered), dim=0)
            dist.scatter(parameter.grad, [total] * world, src=0)
        else:
            dist.gather(parameter.grad, dst=0)
            dist.scatter(parameter.grad, src=0)


step = 0
while step < STEPS:
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        if WAY != "none":
            synchronise()
        if os.environ.get("CLIP"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        print(f"step {step} mean loss {total.item() / world:.7f}")
        step += 1
        if step == STEPS:
            break
dist.destroy_process_group()
