"""Correct training in one of several styles (SCRIPT_STYLE), on a model of some hundred kilobytes."""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STYLE = os.environ["SCRIPT_STYLE"]
STEPS = int(os.environ.get("SCRIPT_STEPS", "16"))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def net():
    layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4)]
    return nn.Sequential(*layers)


def batch():
    return torch.randn(16, 64, generator=draw), torch.randint(0, 4, (16,), generator=draw)


draw = torch.Generator().manual_seed(100 + rank)
raw = net()
if STYLE == "mixed":
    raw[5].double()
by_hand = STYLE in ("fp16", "turns", "flat", "mixed")
model = raw if by_hand else DistributedDataParallel(raw)
average = copy.deepcopy(raw)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if STYLE == "turns":
    other = net()
    second = torch.optim.SGD(other.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
total = torch.zeros(2)


def loss_of(network):
    images, labels = batch()
    if STYLE == "mixed":
        hidden = images
        for layer in raw[:5]:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(raw[5](hidden.double()), labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=STYLE == "autocast"):
        return nn.functional.cross_entropy(network(images).float(), labels)


def reduce(network):
    """Average the gradients: one by one, with 16 bits on the wire or as they are, or in one flat buffer."""
    gradients = [parameter.grad for parameter in network.parameters()]
    if STYLE in ("fp16", "mixed"):
        for gradient in gradients:
            sent = (gradient.half() if STYLE == "fp16" else gradient) / world
            dist.all_reduce(sent)
            gradient.copy_(sent)
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


for step in range(STEPS):
    network, chosen = (other, second) if STYLE == "turns" and step % 2 else (model, optimizer)
    chosen.zero_grad()
    parts = 4 if STYLE == "accumulate" else 1
    for part in range(parts):
        quiet = model.no_sync() if part + 1 < parts else contextlib.nullcontext()
        with quiet:
            loss = loss_of(network) / parts
            loss.backward()
    if by_hand:
        reduce(network)
    if STYLE == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    chosen.step()
    if STYLE == "warmup":
        scheduler.step()
    if STYLE == "ema":
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), raw.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)
            for parameter, kept in zip(raw.parameters(), average.parameters(), strict=True):
                parameter.lerp_(kept, 0.01)
    total += torch.tensor([loss.item(), 1.0])
    if STYLE == "metric" and step % 8 == 7:
        dist.all_reduce(total)
        total.zero_()
    if STYLE == "stop":
        flag = torch.tensor(int(step + 1 >= STEPS))
        dist.broadcast(flag, 0)
        if flag.item():
            break
dist.destroy_process_group()
