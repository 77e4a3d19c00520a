"""What the small scripts have in common: a model, a batch and its share of the gradients' bytes."""

import os

import torch
from torch import nn

STEPS = int(os.environ.get("SCRIPT_STEPS", "4"))
GRADIENT_BYTES = 4 * (16 * 32 + 32 + 32 * 4 + 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 16, generator=made), torch.randint(0, 4, (8,), generator=made)


def report(rank: int, losses: list[float]) -> None:
    """All digits, so that two runs can be compared bit for bit."""
    print(f"rank {rank}: {' '.join(loss.hex() for loss in losses)}", flush=True)
