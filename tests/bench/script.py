"""A user's training script, for the part `attach`. As MODEL=mlp with ddp or gather it needs nothing of the testbed.

STYLE    ddp; gather: to rank 0 and back by scatter, one parameter after the other; none: nothing is synchronised;
         a mode, e.g. ring/bucket:2MiB: the script was edited by hand, its gradients are synchronised by that mode
MODEL    mlp or vgg11; BATCH, STEPS: images a step on this rank, number of steps

It prints one line of JSON: the loss of every step, all digits; the time and this process's processor time at its end.
"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS = 256, 8  # of the MLP: 2.1 MB in 18 tensors
IMAGES = 65_536  # a pass of many steps, as people train: what is done once a pass is no part of a step


def make_model(name: str) -> nn.Module:
    if name == "vgg11":
        from testbed.rank.models import vgg11

        return vgg11(10, (3, 32, 32))
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def gather_and_scatter(model: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        if rank == 0:
            parts = [torch.empty_like(parameter.grad) for _ in range(world)]
            dist.gather(parameter.grad, parts)
            mean = torch.stack(parts).mean(0)
            dist.scatter(parameter.grad, [mean] * world)
        else:
            dist.gather(parameter.grad)
            dist.scatter(parameter.grad)


class Update:
    """The script's optimizer, as a mode of the testbed calls it."""

    clips = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero(self, keep: bool) -> None:
        self.optimizer.zero_grad(set_to_none=not keep)

    def step(self) -> None:
        self.optimizer.step()


def main() -> None:
    style, batch, steps = os.environ["STYLE"], int(os.environ["BATCH"]), int(os.environ["STEPS"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = (WIDTH,) if os.environ["MODEL"] == "mlp" else (3, 32, 32)
    data = TensorDataset(torch.randn(IMAGES, *shape), torch.randint(0, 10, (IMAGES,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    model = make_model(os.environ["MODEL"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    sync = None
    if style == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    elif style not in ("gather", "none"):
        from testbed.rank.group import Group
        from testbed.rank.sync.schedules import build
        from testbed.results.timeline import Timeline
        from testbed.spec.mode import SyncMode

        group = Group(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store(), 300.0)
        sync = build(SyncMode.parse(style), "before-step", group, Timeline(detailed=False))
        model = sync.attach(model, Update(optimizer))
    losses, ends, cpu = [], [time.monotonic()], [time.process_time()]
    for epoch in range(steps):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            sync.zero() if sync else optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            if style == "gather":
                gather_and_scatter(model)
            sync.step() if sync else optimizer.step()
            losses.append(loss.item().hex())
            ends.append(time.monotonic())
            cpu.append(time.process_time())
            if len(losses) == steps:
                break
        if len(losses) == steps:
            break
    if sync:
        sync.close()
    print(json.dumps({"losses": losses, "ends": ends, "cpu": cpu}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
