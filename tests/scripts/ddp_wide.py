"""DDP on a model whose gradients take longer to send than to compute on a slow link: 4.2 MB in several buckets."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(2048, 512), torch.randint(0, 10, (2048,)))
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())])
model = DistributedDataParallel(nn.Sequential(model, nn.Linear(512, 10)), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
while step < STEPS:
    for images, labels in DataLoader(data, batch_size=256):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break
print(f"rank {dist.get_rank()}: loss {loss.item():.9f}")
dist.destroy_process_group()
