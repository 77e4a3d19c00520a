"""DDP with reentrant activation checkpointing, which runs backward passes inside the backward pass."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, _, self.last = common.model()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda values: self.first(values).relu(), images.requires_grad_(), use_reentrant=True)
        return checkpoint(self.last, hidden, use_reentrant=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Checkpointed())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(common.STEPS):
    optimizer.zero_grad()
    images, labels = common.batch(step, rank)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
