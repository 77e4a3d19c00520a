"""Published runs that the model was not made from: what it says with their inputs, of which some are assumed.

docs/predict.md has the same table. The step of these runs has no jitter, and moving bytes costs no processor time.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from testbed.predict.collectives import GOODPUT, Wire
from testbed.predict.step import Node, Work, predict
from testbed.spec.mode import SyncMode

# Bytes of the layers of VGG-16 for 1000 classes: 13 convolutions and 3 linear layers, weights and biases.
CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16 = [4 * (9 * a * b + b) for a, b in pairwise(CHANNELS)]
VGG16 += [4 * (a * b + b) for a, b in ((25088, 4096), (4096, 4096), (4096, 1000))]
INCEPTION = [4 * 250_000] * 95  # 23.8 million parameters; assumed: equal layers
PASCAL_S = {"vgg16": 64 / 154, "inception": 64 / 142}  # assumed: a batch of 64 on one P100


def equal_layers(compute: float, sizes: list[int]) -> Work:
    """Assumed: all layers take the same time, a third of it in forward."""
    each, tensors = compute / 3 / len(sizes), tuple((size, layer) for layer, size in enumerate(sizes))
    return Work(0.0, (each,) * len(sizes), 0.0, (2 * each,) * len(sizes), 0.0, tensors[::-1])


def efficiency(work: Work, mode: str, nodes: int, rate: float, delay: float = 0.0) -> float:
    wire = Wire(rate=rate / 8 * GOODPUT, latency=delay)
    return work.compute / predict(work, Node(), wire, SyncMode.parse(mode), nodes).seconds


@pytest.mark.parametrize(("rate", "published"), [(330e6, 0.83), (1.5e9, 0.96)])
def test_intellect_1(rate: float, published: float) -> None:
    """14 nodes, 100 inner steps of 38 minutes, 10 GB of int8; assumed: the rate of the slowest link, 50 ms."""
    inner = equal_layers(38 * 60 / 100, [10**10])
    assert efficiency(inner, "ring/every:100", 14, rate, 0.05) == pytest.approx(published, abs=0.01)


def test_opendiloco() -> None:
    """500 inner steps, the slowest link 127 Mbit/s, 6.9 % of the time is the all-reduce.

    Assumed: 4 nodes, 1.1 billion parameters, 67.5 minutes of computing, 50 ms.
    """

    def waiting(size: float) -> float:
        inner = equal_layers(67.5 * 60 / 500, [int(size * 1.1e9)])
        return 1 - efficiency(inner, "ring/every:500", 4, 127e6, 0.05)

    assert 0.04 < waiting(2) < 0.069 < waiting(4) < 0.10


@pytest.mark.parametrize(("model", "sizes", "published"), [("vgg16", VGG16, 0.68), ("inception", INCEPTION, 0.90)])
def test_horovod(model: str, sizes: list[int], published: float) -> None:
    """128 servers at 25 Gbit/s: between a ring after backward and one that overlaps in buckets of 64 MiB."""
    work = equal_layers(PASCAL_S[model], sizes)
    modes = ("ring", "ring/bucket:64MiB/overlap")
    after, overlapping = (efficiency(work, mode, 128, 25e9) for mode in modes)
    assert after < published < overlapping < after + 0.27


def test_vgg_16_has_138_million_parameters() -> None:
    assert sum(VGG16) == 4 * 138_357_544
