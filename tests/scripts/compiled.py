"""torch.compile on a DDP model, and on a function with a collective inside."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.compile(DistributedDataParallel(common.model()), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="eager")
def metric(loss):
    total = loss.detach() * 1.0
    dist.all_reduce(total)
    return total / 2


losses = []
for step in range(common.STEPS):
    images, labels = common.batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    metric(loss)
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
