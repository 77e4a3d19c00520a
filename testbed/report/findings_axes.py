"""Findings along a swept quantity: where scaling stops, where curves cross, what the best setting wins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from testbed.report.axes import Crossing, Curve
from testbed.report.cells import Cell, Chapter
from testbed.report.findings import listed, percent, rate_in_words

REAL = 0.02  # a change smaller than this share is no change
MOST = 4  # methods that a sentence names one by one


def rate(value: float) -> str:
    """As exact as a point between two measurements can be."""
    return rate_in_words(value, 2)


def nodes(curves: dict[str, Curve]) -> str:
    """Who falls at every step, and where the others stop."""
    falls, stops = [], []
    for name, curve in curves.items():
        times = [(int(x), cell.seconds.centre) for x, cell in curve]
        worse = next(((a, b) for a, b in itertools.pairwise(times) if b[1] > (1 - REAL) * a[1]), None)
        if worse is None:
            falls.append(name)
        else:
            verb = "gets slower" if worse[1][1] > (1 + REAL) * worse[0][1] else "gains nothing"
            stops.append(f"{name} {verb} from {worse[0][0]} to {worse[1][0]} nodes")
    said = [f"{listed(falls)} {'get' if len(falls) > 1 else 'gets'} faster with every node"] if falls else []
    return "; ".join([*said, *stops[:2]]) + (f"; so do {len(stops) - 2} more" if len(stops) > 2 else "")


def efficiency(chapter: Chapter, curves: dict[str, Curve]) -> str:
    ends = {
        name: ((chapter.speed_up(curve[-1][1]) or 0.0) / curve[-1][0], curve[-1][0]) for name, curve in curves.items()
    }
    best, worst = max(ends, key=lambda n: ends[n]), min(ends, key=lambda n: ends[n])
    text = f"At {ends[best][1]:g} nodes {best} makes use of {percent(ends[best][0])} of them"
    return text if best == worst else f"{text}, {worst} of {percent(ends[worst][0])}"


def weak(curves: dict[str, Curve]) -> str:
    gains = {n: c[-1][1].images_per_second / c[0][1].images_per_second for n, c in curves.items()}
    best = max(gains, key=lambda name: gains[name])
    first, last = curves[best][0][0], curves[best][-1][0]
    return f"With {best}, {last:g} nodes get through {gains[best]:.1f} times the images of {first:g}"


def bandwidth(curves: dict[str, Curve], met: Sequence[Crossing], single: Cell | None) -> str:
    """From which rate on each method beats one node; without a baseline, who is fastest where."""
    pays = {each.right: each.at for each in met if each.left == "one node"}
    if single:
        level = single.seconds.centre
        always = [n for n, curve in curves.items() if n not in pays and curve[-1][1].seconds.centre < level]
        ordered = sorted(pays.items(), key=lambda pair: pair[1])
        said = [f"{name} {'beats one node ' * (k == 0)}from {rate(at)} on" for k, (name, at) in enumerate(ordered)]
        said = [*said[:MOST], f"{len(said) - MOST} more from higher rates on"] if len(said) > MOST + 1 else said
        never = [name for name in curves if name not in pays and name not in always]
        said += [f"{listed(always)} {'beats one node ' * (not said)}at every rate"] if always else []
        said += [f"{listed(never)} {'beats one node ' * (not said)}at none of these rates"] if never else []
        return ", ".join(said)
    ends = [min(curves, key=lambda n: curves[n][k][1].seconds.centre) for k in (0, -1)]
    low = rate(min(x for c in curves.values() for x, _ in c))
    if ends[0] == ends[1]:
        return f"{ends[0]} is the fastest from {low} up"
    return f"{ends[0]} is the fastest at {low}, {ends[1]} at the highest rate"


def buckets(curves: dict[str, Curve], levels: Sequence[Cell]) -> str:
    name, curve = min(curves.items(), key=lambda pair: min(c.seconds.centre for _, c in pair[1]))
    best = min((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    worst = max((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    gain = worst.seconds.centre / best.seconds.centre - 1
    own = next((cell for cell in levels if cell.spec.mode.algorithm == best.spec.mode.algorithm), None)
    if gain < REAL:
        return f"The size of a bucket makes no difference to {name}: {percent(gain)} between best and worst"
    tail = f", {own.seconds.centre / best.seconds.centre:.2f} times as fast as {own.label}'s own" if own else ""
    times = f"{best.seconds.centre:.2f} s against {worst.seconds.centre:.2f} s for {worst.label}"
    return f"{best.label} is best: {times}{tail}"


def skipping_speed(curves: dict[str, Curve]) -> str:
    name, curve = max(curves.items(), key=lambda pair: pair[1][0][1].seconds.centre / pair[1][-1][1].seconds.centre)
    gain = curve[0][1].seconds.centre / curve[-1][1].seconds.centre
    return f"Synchronising every {curve[-1][0]:g} steps makes {name} {gain:.2f} times as fast"


def skipping_accuracy(curves: dict[str, Curve]) -> str:
    for name, curve in curves.items():
        known = [(x, 100 * a) for x, cell in curve if (a := cell.first.summary.test_accuracy) is not None]
        if len(known) > 1:
            change = known[-1][1] - known[0][1]
            verb = "costs" if change < 0 else "gains"
            return f"every:{known[-1][0]:g} {verb} {name} {abs(change):.1f} points of accuracy"
    return "Accuracy against skipped synchronisation"


def places(both: Sequence[dict[str, Cell]]) -> str:
    """How far apart two places are at most."""
    gaps = []
    for cells in both:
        times = [cell.seconds.centre for cell in cells.values()]
        gaps.append((max(times) / min(times) - 1, next(iter(cells.values())).label))
    gap, label = max(gaps)
    names = listed(list(dict.fromkeys(place for cells in both for place in cells)))
    return f"{names} agree within {percent(gap)} (furthest apart: {label})"
