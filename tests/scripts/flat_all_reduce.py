"""One all_reduce of a flat copy of all gradients, by the same helper that averages the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "12"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1 + dist.get_rank())


def average(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


for step in range(STEPS):
    batch, target = torch.randn(8, 32, generator=draw), torch.randint(0, 4, (8,), generator=draw)
    for parameter in model.parameters():
        parameter.grad = None
    loss = nn.functional.cross_entropy(model(batch), target)
    loss.backward()
    flat = average(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    first = 0
    for parameter in model.parameters():
        parameter.grad = flat[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()
    optimizer.step()
    print(f"step {step} mean loss {average(loss.detach().clone()).item():.7f}")
dist.destroy_process_group()
