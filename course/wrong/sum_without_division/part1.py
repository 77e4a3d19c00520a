"""Part 1: training on one node."""

import torch
from starter import BATCH, LEARNING_RATE, SEED, dataset, model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(SEED)
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
data = dataset()
sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=SEED)  # the order of parts 2 and 3
for step, (images, labels) in enumerate(DataLoader(data, batch_size=BATCH, sampler=sampler)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(images), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} loss {loss.item():.4f}")
