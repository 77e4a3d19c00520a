"""Starts its rank as a process (START_METHOD), which has workers of a DataLoader; evaluates between steps."""

import os

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

METHOD = os.environ.get("START_METHOD", "spawn")


def train(local, rank):
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    data = TensorDataset(*common.batch(0, rank))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=METHOD)
    model = DistributedDataParallel(common.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _epoch in range(common.STEPS // 2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = sum((model(images).argmax(1) == labels).sum() for images, labels in DataLoader(data, batch_size=8))
        dist.all_reduce(right)
        model.train()
    common.report(rank, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    mp.start_processes(train, args=(rank,), nprocs=1, start_method=METHOD)
