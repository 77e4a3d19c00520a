"""A GAN with two optimizers that take turns, both models in DDP. Correct."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
judge = nn.functional.binary_cross_entropy_with_logits
torch.manual_seed(1 + dist.get_rank())
for _ in range(STEPS):
    real, fake = torch.randn(8, 16), generator(torch.randn(8, 8))
    for_critic.zero_grad()
    judge(critic(real), torch.ones(8, 1)).backward()
    judge(critic(fake.detach()), torch.zeros(8, 1)).backward()
    for_critic.step()
    for_generator.zero_grad()
    judge(critic(fake), torch.ones(8, 1)).backward()
    for_generator.step()
dist.destroy_process_group()
