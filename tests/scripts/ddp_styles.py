"""DDP with gradient accumulation (no_sync), a GradScaler, a communication hook, or a closure: STYLE says which."""

import contextlib
import functools
import os

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

STYLE = os.environ["STYLE"]


def own_hook(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(common.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=STYLE == "scaler")
if STYLE == "hook":
    model.register_comm_hook(None, own_hook)
if STYLE == "fp16":
    model.register_comm_hook(None, fp16_compress_hook)
losses = []


def closure(step):
    optimizer.zero_grad()
    images, labels = common.batch(step, rank)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss


for step in range(common.STEPS):
    if STYLE == "closure":
        losses.append(optimizer.step(functools.partial(closure, step)).item())
        continue
    optimizer.zero_grad()
    parts = 2 if STYLE == "accumulate" else 1
    for part in range(parts):
        images, labels = common.batch(parts * step + part, rank)
        with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels) / parts
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
common.report(rank, losses)
dist.destroy_process_group()
