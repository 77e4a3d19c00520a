"""Gradients are averaged by hand after backward, or in hooks of backward: STYLE says how.

WIDTH: of the layers. OPTIMIZERS=2: the last layer has one of its own.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTH = int(os.environ.get("SCRIPT_STEPS", "20")), int(os.environ.get("WIDTH", "48"))
STYLE = os.environ["STYLE"]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % world, (rank - 1) % world
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
first = list(model.parameters())[: -2 if os.environ.get("OPTIMIZERS") == "2" else None]
optimizers = [torch.optim.SGD(first, lr=0.05, momentum=0.9)]
if os.environ.get("OPTIMIZERS") == "2":
    optimizers.append(torch.optim.SGD(model[-1].parameters(), lr=0.05, momentum=0.9))
draw = torch.Generator().manual_seed(1 + rank)
works = []


def flat_gradients():
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def set_gradients(flat):
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def one_by_one():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def divided_before():
    for parameter in model.parameters():
        parameter.grad.data.div_(world)
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)


def asynchronous():
    started = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work, parameter in zip(started, model.parameters(), strict=True):
        work.wait()
        parameter.grad /= world


def by_future():
    started = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work, parameter in zip(started, model.parameters(), strict=True):
        (summed,) = work.get_future().wait()
        parameter.grad = summed / world


def half():
    for parameter in model.parameters():
        short = parameter.grad.half()
        dist.all_reduce(short)
        parameter.grad.copy_(short.float() / world)


def flat():
    together = flat_gradients()
    dist.all_reduce(together)
    set_gradients(together / world)


def flat_half():
    together = (flat_gradients() / world).half()
    dist.all_reduce(together)
    set_gradients(together.float())


def coalesced():
    gradients = [parameter.grad for parameter in model.parameters()]
    dist.all_reduce_coalesced(gradients)
    for gradient in gradients:
        gradient /= world


def reduced():
    for parameter in model.parameters():
        dist.reduce(parameter.grad, dst=0)
        parameter.grad /= world
        dist.broadcast(parameter.grad, src=0)


def gathered():
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(world)]
        dist.all_gather(parts, parameter.grad)
        parameter.grad = torch.stack(parts).mean(0)


def gathered_whole():
    together = flat_gradients()
    everyone = torch.empty(world * together.numel())
    dist.all_gather_into_tensor(everyone, together)
    set_gradients(everyone.view(world, -1).mean(0))


def sharded():
    together = flat_gradients()
    together = torch.cat([together, torch.zeros(-together.numel() % world)])
    own = torch.empty(together.numel() // world)
    dist.reduce_scatter_tensor(own, together)
    own /= world
    dist.all_gather_into_tensor(together, own)
    set_gradients(together[: sum(p.numel() for p in model.parameters())])


def sharded_lists():
    together = flat_gradients()
    together = torch.cat([together, torch.zeros(-together.numel() % world)])
    parts = list(together.chunk(world))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    means = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(means, own / world)
    set_gradients(torch.cat(means)[: sum(p.numel() for p in model.parameters())])


def ring():
    travelling = flat_gradients()
    total = travelling.clone()
    for _ in range(world - 1):
        other = torch.empty_like(travelling)
        sends = [dist.P2POp(dist.isend, travelling, right), dist.P2POp(dist.irecv, other, left)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        total, travelling = total + other, other
    set_gradients(total / world)


def to_rank_0():
    for parameter in model.parameters():
        if rank == 0:
            other = torch.empty_like(parameter.grad)
            for sender in range(1, world):
                dist.recv(other, sender)
                parameter.grad += other
            parameter.grad /= world
        else:
            dist.send(parameter.grad, 0)
        dist.broadcast(parameter.grad, 0)


def subgroup():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=everyone_else)
        parameter.grad /= world


def wait_for_hooks():
    for work in works:
        work.wait()
    works.clear()
    for parameter in model.parameters():
        parameter.grad /= world


def copy_from_hooks():
    for work, parameter, copy in works:
        work.wait()
        parameter.grad.copy_(copy / world)
    works.clear()


def nothing():
    pass


def start_in_hook(parameter):
    works.append(dist.all_reduce(parameter.grad, async_op=True))


def average_in_hook(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= world


def copy_in_hook(parameter):
    copy = parameter.grad.clone()
    works.append((dist.all_reduce(copy, async_op=True), parameter, copy))


def average_tensor(gradient):
    dist.all_reduce(gradient)
    return gradient / world


everyone_else = dist.new_group(list(range(world)))
hooks = {"hook_async": start_in_hook, "hook": average_in_hook, "hook_copy": copy_in_hook}
after = {"hook_async": wait_for_hooks, "hook_copy": copy_from_hooks}
for parameter in model.parameters():
    if STYLE in hooks:
        parameter.register_post_accumulate_grad_hook(hooks[STYLE])
    elif STYLE == "tensor_hook":
        parameter.register_hook(average_tensor)
synchronise = after.get(STYLE) or (nothing if "hook" in STYLE else globals()[STYLE])
for step in range(STEPS):
    batch, target = torch.randn(8, 32, generator=draw), torch.randint(0, 4, (8,), generator=draw)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), target)
    loss.backward()
    synchronise()
    for optimizer in optimizers:
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    print(f"step {step} mean loss {mean.item() / world:.7f}", flush=True)
dist.destroy_process_group()
