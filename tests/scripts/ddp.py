"""A plain DDP script: correct, with a DistributedSampler and set_epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "12"))

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = torch.randn(512, 64), torch.randint(0, 10, (512,))
data = TensorDataset(images, labels)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break
    if step == STEPS:
        break
print(f"rank {dist.get_rank()}: loss {loss.item():.6f}")
dist.destroy_process_group()
