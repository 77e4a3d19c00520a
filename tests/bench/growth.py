"""How a collective grows with the number of ranks: 8 MB at 100 Mbit, 2 to 16 namespaces, and one plot of it.

TCP hands over 16 KiB at once, which a bucket of 100 Mbit passes whole. Cut into frames, what 16 nodes send takes more
than two cores: `ring/flat` took 1.8 times as long as the network needs, and Gloo's all_reduce was no faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from testbed.net.tcp import efficiency
from tests.bench.collective import Times, collectives
from tests.bench.figures import Figure, spread
from tests.bench.shaped import network
from tests.support.provenance import ROOT

SIZES = (2, 4, 8, 16)
ELEMENTS = 2_000_000  # float32: 8 MB
RATE, BITS_PER_SECOND, SEGMENT = "100mbit", 100e6, "16KiB"
REPEATS = 3
PLOT = ROOT / "results" / "growth.svg"


def measure() -> Iterator[Figure]:
    found = {n: _times(n) for n in SIZES}
    theory = {n: {"ring": 2 * (n - 1) / n * _once(), "gather": 2 * (n - 1) * _once()} for n in SIZES}
    for n in SIZES:
        for name in ("ring", "gather"):
            yield Figure(
                name=f"{name}/flat, 8 MB, {RATE}, N = {n}: time / theory",
                value=statistics.median(found[n][name]) / theory[n][name],
                low=0.85,
                high=1.15,
                detail=f"{spread(found[n][name])}, theory {theory[n][name]:.3f} s",
            )
    _plot(found, theory)


def _once() -> float:
    """Seconds to pass the buffer over one link once."""
    return ELEMENTS * 32 / (BITS_PER_SECOND * efficiency())


def _times(n: int) -> Times:
    with network(RATE, n, segment=SEGMENT) as (substrate, _, folder):
        return collectives(substrate, folder, REPEATS, ELEMENTS, "ring,gather")


def _plot(found: dict[int, Times], theory: dict[int, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, colour in (("gather", "#d55e00"), ("ring", "#0072b2")):
        axes.plot(SIZES, [theory[n][name] for n in SIZES], "--", color=colour, label=f"{name}, theory")
        axes.plot(SIZES, [statistics.median(found[n][name]) for n in SIZES], "o", color=colour, label=name)
    axes.set(xlabel="ranks", ylabel="seconds", xticks=SIZES, title=f"8 MB at {RATE}: the ring levels off, gather grows")
    axes.legend()
    figure.savefig(PLOT, bbox_inches="tight")
    print(f"  plot: {PLOT}", flush=True)
