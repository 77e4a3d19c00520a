"""fully_shard: parameters are DTensors, gathered before they are used."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = common.model()
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for step in range(common.STEPS):
    images, labels = common.batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
