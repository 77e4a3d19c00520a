"""Every rank looks at the same batch before training, and at one of its own. Correct: DDP and set_epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "9"))

dist.init_process_group("gloo")
torch.manual_seed(0)
world = dist.get_world_size()
data = TensorDataset(torch.randn(12 * world, 32), torch.randint(0, 4, (12 * world,)))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler)
first, _ = next(iter(DataLoader(data, batch_size=4)))  # the same on all ranks, to see its shape
own, _ = next(iter(loader))
model = DistributedDataParallel(nn.Sequential(nn.Linear(first.shape[1], 24), nn.ReLU(), nn.Linear(24, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = epoch = 0
while step < STEPS:
    sampler.set_epoch(epoch)
    epoch += 1
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break
dist.destroy_process_group()
