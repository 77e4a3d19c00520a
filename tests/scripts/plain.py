"""Training without any synchronisation: the script never calls init_process_group."""

import os
import sys

import torch
from torch import nn

print(sys.argv[1:], __name__)
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(int(os.environ.get("SCRIPT_STEPS", "12"))):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
