"""A DDP script that trains the right model and wastes time: each word of SCRIPT_COSTS is one way to do so."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))
COSTS = os.environ.get("SCRIPT_COSTS", "").split()

dist.init_process_group("gloo")
if "threads" in COSTS:
    torch.set_num_threads(2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
model = DistributedDataParallel(model, find_unused_parameters="unused" in COSTS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = epoch = 0
while step < STEPS:
    if "epoch" not in COSTS:
        sampler.set_epoch(epoch)
    epoch += 1
    for images, labels in loader:
        optimizer.zero_grad()
        for _ in range(2 if "accumulate" in COSTS else 1):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
        if "again" in COSTS:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        if "metric" in COSTS:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
        step += 1
        if step == STEPS:
            break
dist.destroy_process_group()
