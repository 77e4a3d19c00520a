"""What every submission gets: the model, the data, and how the nodes find each other. Submissions cannot change it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

SEED = 0
BATCH = 48  # images per step, over all nodes
STEPS = 10  # of one pass over the data
LEARNING_RATE = 0.1


def model() -> nn.Module:
    """101,770 numbers. Call torch.manual_seed(SEED) before, so that all nodes start from the same ones."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def dataset() -> TensorDataset:
    """480 images of 28 x 28, ten classes; always the same ones, nothing is downloaded."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(0, 10, (BATCH * STEPS,), generator=generator)
    centres = torch.randn(10, 1, 28, 28, generator=generator)
    return TensorDataset(centres[labels] + torch.randn(len(labels), 1, 28, 28, generator=generator), labels)


def join() -> tuple[int, int]:
    """Join the process group; return this node's rank and the number of nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--master-ip", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    given = parser.parse_args()
    where = f"tcp://{given.master_ip}:{given.port}"
    dist.init_process_group("gloo", init_method=where, rank=given.rank, world_size=given.num_nodes)
    return given.rank, given.num_nodes
