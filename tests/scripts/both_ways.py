"""Every simple collective twice: as most scripts write it, and with the group named, which changes nothing."""

import common
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = common.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


def send(values: torch.Tensor, **options: object) -> None:
    parts = [torch.zeros_like(values) for _ in range(world)]
    dist.all_reduce(values, **options)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, **options)
    dist.broadcast(values, 1, **options)
    dist.reduce(values, dst=1, **options)
    dist.gather(values, parts if rank == 0 else None, **options)
    dist.scatter(values, parts if rank == 1 else None, src=1, **options)
    dist.all_gather(parts, values, **options)
    dist.all_reduce(values, async_op=True, **options).wait()


for step in range(common.STEPS):
    images, labels = common.batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    send(torch.full((8,), float(rank)))
    send(torch.full((8,), float(rank)), group=dist.group.WORLD)
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
