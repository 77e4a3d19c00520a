"""A script that knows nothing of other ranks."""

import os

import torch
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "8"))
torch.manual_seed(int(os.environ["RANK"]))
model = nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(STEPS):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 32)), torch.randint(0, 4, (8,))).backward()
    optimizer.step()
