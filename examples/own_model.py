"""A model and data of your own: testbed run --model examples/own_model.py:make --data examples/own_model.py:load"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Attention(nn.Module):
    """One layer of attention over the numbers of a sample, each embedded by the same weights that read the answer."""

    def __init__(self, classes: int, channels: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.mix = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.mix.weight  # one parameter in two layers
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)  # a parameter that is not trained
        self.answer = nn.Linear(width * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        answer: Tensor = self.answer((self.again(torch.tanh(self.mix(x))) * self.scale).flatten(1))
        return answer


def make(classes: int, channels: int) -> nn.Module:
    """Called by every rank. `channels` is the first size of a sample: the 12 numbers below, or 3 for colour images."""
    return Attention(classes, channels)


def load() -> tuple[TensorDataset, TensorDataset]:
    """A training and a test set of torch's kind: dataset[i] is a tensor and a class."""
    random = torch.Generator().manual_seed(1)
    samples, weights = torch.randn(2000, 12, generator=random), torch.randn(12, 5, generator=random)
    classes = (samples @ weights).argmax(1)
    return TensorDataset(samples[:1600], classes[:1600]), TensorDataset(samples[1600:], classes[1600:])
