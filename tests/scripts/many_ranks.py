"""Forks two ranks on every node: one process group of all nodes, or one a node (SCRIPT_GROUP). Each has its data.

SCRIPT_FAULT=data: all ranks train on the same images.
"""

import os
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EACH = 2
FAULT = os.environ.get("SCRIPT_FAULT", "")


def train(local, node, nodes):
    if os.environ.get("SCRIPT_GROUP") == "node":
        dist.init_process_group("gloo", f"file://{Path.cwd()}/store", rank=local, world_size=EACH)
    else:
        dist.init_process_group("gloo", rank=node * EACH + local, world_size=nodes * EACH)
    model = DistributedDataParallel(common.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(common.STEPS):
        images, labels = common.batch(step, 0 if FAULT == "data" else dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    variables = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    mp.start_processes(train, args=variables, nprocs=EACH, start_method="fork")
