"""DDP with BatchNorm buffers, Adam and a learning rate schedule.

PASSES: micro-batches a step. CLIP=1: clipped. DDP: its options that are on, e.g. static_graph. HOOK=1: sent as fp16.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, PASSES = int(os.environ.get("SCRIPT_STEPS", "12")), int(os.environ.get("PASSES", "1"))

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
loader = iter(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)))
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)),
    **dict.fromkeys(os.environ.get("DDP", "").split(), True),
)
if os.environ.get("HOOK"):
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for _ in range(STEPS):
    optimizer.zero_grad()
    for number in range(PASSES):
        batch, target = next(loader)
        last = number == PASSES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(batch), target) / PASSES
            loss.backward()
    if os.environ.get("CLIP"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
model.eval()
print(f"rank {dist.get_rank()}: loss {loss.item():.6f}")
dist.destroy_process_group()
