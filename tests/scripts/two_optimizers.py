"""Two models and two optimizers that take turns; gradients of both are averaged by all_reduce."""

import common
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator, critic = nn.Linear(4, 16), nn.Linear(16, 1)
optimizers = {model: torch.optim.Adam(model.parameters(), lr=0.01) for model in (critic, generator)}
losses = []


def train(model, loss):
    for each in optimizers.values():
        each.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizers[model].step()
    return loss.item()


for step in range(common.STEPS):
    real, _ = common.batch(step, rank)
    noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    losses.append(train(critic, critic(generator(noise).detach()).mean() - critic(real).mean()))
    losses.append(train(generator, -critic(generator(noise)).mean()))
common.report(rank, losses)
dist.destroy_process_group()
