"""Trains three steps on a data set of torchvision, e.g. MNIST ./data. Only the first part is downloaded."""

import sys

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torchvision import transforms

kind, root = getattr(torchvision.datasets, sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
data = kind(root, download=True, transform=transforms.ToTensor())
test = kind(root, train=False)
print(
    f"{len(data)} images, {len(test)} for testing, sum {int(data.data[:100].sum())}, class {data.classes[data[0][1]]}"
)
size = data[0][0].numel()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(size, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (images, labels) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if step == 2:
        break
dist.destroy_process_group()
