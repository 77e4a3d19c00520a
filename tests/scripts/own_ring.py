"""Hand-written: a ring of isend and irecv, and one of batch_isend_irecv."""

import common
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % world, (rank - 1) % world
model = common.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def pass_on(own: torch.Tensor, batched: bool) -> torch.Tensor:
    other = torch.empty_like(own)
    if batched:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, other, left)])
    else:
        works = [dist.irecv(other, left), dist.isend(own, right)]
    for work in works:
        work.wait()
    return other


losses = []
for step in range(common.STEPS):
    images, labels = common.batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    total, travelling = flat.clone(), flat
    for _ in range(world - 1):
        travelling = pass_on(travelling, batched=step % 2 == 1)
        total += travelling
    for parameter, mean in zip(
        model.parameters(), (total / world).split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.grad.copy_(mean.view_as(parameter))
    optimizer.step()
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
