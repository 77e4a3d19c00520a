"""One model, synchronised in the way that the first argument names: ddp, all_reduce or gather (and scatter)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "30"))
way = sys.argv[1]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(8 * world * STEPS, 512), torch.randint(0, 10, (8 * world * STEPS,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
if way == "ddp":
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for batch, target in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), target)
    loss.backward()
    for parameter in model.parameters():
        if way == "all_reduce":
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        elif way == "gather" and rank == 0:
            parts = [torch.empty_like(parameter.grad) for _ in range(world)]
            dist.gather(parameter.grad, parts)
            mean = torch.stack(parts).mean(0)
            dist.scatter(parameter.grad, [mean] * world)
        elif way == "gather":
            dist.gather(parameter.grad)
            dist.scatter(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
