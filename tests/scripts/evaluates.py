"""DDP that accumulates without no_sync() and clips after each pass; rank 0 evaluates alone before each second step."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(common.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


@torch.no_grad()
def evaluate():
    model.eval()
    images, labels = common.batch(1000, rank)
    loss = nn.functional.cross_entropy(model.module(images), labels)
    model.train()
    return loss.item()


for step in range(common.STEPS):
    if step % 2 == 0 and rank == 0:
        evaluate()
    optimizer.zero_grad(set_to_none=True)
    for part in range(2):
        model.require_backward_grad_sync = part == 1  # what no_sync() does
        images, labels = common.batch(2 * step + part, rank)
        loss = nn.functional.cross_entropy(model(images), labels) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)  # after each pass; no norm is so large
    optimizer.step()
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
