"""Every seam in one short script: DDP, work by hand, a GradScaler, a sampler, clipping, an evaluation, a fork."""

import os

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(*common.batch(0, rank))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
model = DistributedDataParallel(common.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
losses = []
for images, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    work = dist.all_reduce(loss.detach().clone(), async_op=True)
    dist.broadcast(loss.detach().clone(), 0)
    work.wait()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    model.eval()
    model.train()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
common.report(rank, losses)
dist.destroy_process_group()
raise SystemExit(7)
