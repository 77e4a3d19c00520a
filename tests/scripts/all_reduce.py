"""Hand-written: an all_reduce per parameter, one for all of them, one without waiting, and a maximum as a metric."""

import time

import common
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = common.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(common.STEPS):
    images, labels = common.batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if step % 2:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= world
    else:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        time.sleep(0.3 if step == 2 * rank else 0.0)  # the other rank waits for this one
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient) / world)
    optimizer.step()
    worst = loss.detach().clone()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
