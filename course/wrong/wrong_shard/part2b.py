"""Wrong: ranks are counted from 1 here, so ranks 0 and 1 have the same shard and nobody has the last one."""

import torch
import torch.distributed as dist
from starter import BATCH, LEARNING_RATE, SEED, dataset, join, model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

rank, world = join()
torch.manual_seed(SEED)
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
data = dataset()
sampler = DistributedSampler(data, num_replicas=world, rank=max(0, rank - 1), seed=SEED)
for step, (images, labels) in enumerate(DataLoader(data, batch_size=BATCH // world, sampler=sampler)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(images), labels)
    loss.backward()
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    print(f"step {step + 1} loss {loss.item():.4f}")
dist.destroy_process_group()
