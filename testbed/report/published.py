"""Compare our runs with published figures, and check whether the published findings were reproduced.

An experiment file has `[published]` tables of figures, one per measure, keyed by mode, and `[[published.shape]]`
claims: a sentence (`says`) and the rule that checks it on our runs:

    rising = ["gather", "allreduce", "ddp"]         measure = "speed_up" rises in this order
    equal = ["allreduce", "ring"]  within = 0.02    measure = "last_loss" is equal, within a share of it
    apart = ["ring", "ring|after"]  by = 0.1        it differs by more; `|after`: synchronised after the step
    goes = "up"  mode = "gather"  over = "nodes"  from = 3  to = 4       (or "down", "flat", a list of them)
    below = 1.0  modes = ["gather", "ddp"]          (or `above`)
    busiest = 0  mode = "gather"                    this rank sends most

`where = { placement = "after-step" }` selects runs by any key of the spec. A claim that our runs cannot decide is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from testbed.report.model import Cell, Chapter, value_of
from testbed.report.sentences import COMPARE_STEPS, Claim, states
from testbed.report.tables import (
    DASH,
    Table,
    bandwidth_used,
    epoch_seconds,
    epoch_steps,
    times,
    weak_speed_up,
)

MISSING = f"no run with {COMPARE_STEPS} steps or more"
FLAT = 0.05  # a change smaller than this share counts as flat
MEASURES: dict[str, tuple[str, Callable[[Chapter, Cell], float | None]]] = {
    "seconds_per_step": ("s/iter", lambda chapter, cell: cell.seconds.centre),
    "rank0_seconds_per_step": ("s/iter, rank 0", lambda chapter, cell: cell.per_rank("total")[0]),
    "others_seconds_per_step": ("s/iter, other ranks", lambda chapter, cell: _mean(cell.per_rank("total")[1:])),
    "speed_up": ("speed-up", lambda chapter, cell: chapter.speed_up(cell)),
    "test_loss": ("test loss", lambda chapter, cell: cell.first.summary.test_loss),
    "accuracy_percent": ("accuracy %", lambda chapter, cell: _percent(cell.first.summary.test_accuracy)),
    "first_loss": ("first loss", lambda chapter, cell: _epoch_loss(cell, 0)),
    "last_loss": ("last loss", lambda chapter, cell: _epoch_loss(cell, -1)),
    "total_seconds": ("total s", lambda chapter, cell: _total_seconds(cell)),
    "compute_share_percent": ("profiler: compute %", lambda chapter, cell: _profiled(cell, "compute")),
    "communication_share_percent": ("communication %", lambda chapter, cell: _profiled(cell, "communication")),
    "hidden_share_percent": ("hidden %", lambda chapter, cell: _percent(cell.split.hidden_share)),
    "images_per_second": ("images/s", lambda chapter, cell: cell.images_per_second),
    "weak_speed_up": ("speed-up by images/s", lambda chapter, cell: weak_speed_up(chapter, cell)),
    "epoch_seconds": ("s/epoch", lambda chapter, cell: epoch_seconds(cell)),
    "epoch_communication_seconds": (
        "communication s/epoch",
        lambda chapter, cell: times(epoch_steps(cell), cell.split.busy),
    ),
    "bandwidth_megabytes": ("MB/s, all ranks", lambda chapter, cell: bandwidth_used(cell)),
    "train_accuracy_percent": ("train accuracy %", lambda chapter, cell: _percent(_train_accuracy(cell))),
}


@dataclass(frozen=True)
class Published:
    """A sentence for each claim, and the figures side by side."""

    sentences: list[Claim]
    table: Table


def published(chapter: Chapter) -> Published | None:
    """None if the experiment has no published figures."""
    figures = chapter.experiment.published if chapter.experiment else {}
    if not figures:
        return None
    return Published(claims(chapter), _table(chapter, figures))


@states(steps=1, otherwise=[])
def claims(chapter: Chapter) -> list[Claim]:
    """Each published finding with its state, and first how many of those that our runs decide hold here."""
    shape = (chapter.experiment.published if chapter.experiment else {}).get("shape") or []
    found = [_judge(chapter, claim) for claim in shape if isinstance(claim, dict)]
    decided = [claim for claim in found if claim.state != "open"]
    good = sum(claim.state == "yes" for claim in decided)
    whole = "yes" if good == len(decided) else "no"
    heads = [Claim(whole, f"{good} of {len(decided)} published findings hold here.")] if decided else []
    return [*heads, *found]


def _table(chapter: Chapter, figures: dict[str, Any]) -> Table:
    """One row per mode, and for each measure a column of published figures and one of ours."""
    measures = [key for key in figures if key in MEASURES and isinstance(figures[key], dict)]
    theirs = {key: _rows(figures[key]) for key in measures}
    modes = list(dict.fromkeys(mode for key in measures for mode in theirs[key]))
    header = ["", *(f"{MEASURES[key][0]}, {whose}" for key in measures for whose in ("published", "ours"))]
    rows = []
    for mode in modes:
        cell = _pick(chapter, mode, {}) or _in_grid(chapter, mode)
        row = [str(mode)]
        for key in measures:
            ours = MEASURES[key][1](chapter, cell) if cell else None
            row += [_text(theirs[key].get(mode)), _text(ours)]
        rows.append(row)
    where = str(figures.get("source") or "the report")
    note = f"Published: {where}. On other machines, so seconds differ; order, ratios and bottleneck should be the same."
    return Table("published", "Published and ours", header, rows, note)


def _rows(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures by mode; those of a grid, `4 = { 32 = 3.54 }`, by number of workers and batch per worker."""
    rows: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            rows |= {f"{name} workers, batch {batch}": figure for batch, figure in value.items()}
        else:
            rows[str(name)] = value
    return rows


def _in_grid(chapter: Chapter, name: str) -> Cell | None:
    """The cell that is named `4 workers, batch 32`."""
    named = {f"{cell.world} workers, batch {cell.spec.local_batch(0)}": cell for cell in chapter.cells}
    return named.get(name)


def _judge(chapter: Chapter, claim: dict[str, Any]) -> Claim:
    """Check a claim. It is open if it cannot be read or runs are missing; the sentence then has the reason."""
    says = str(claim.get("says") or "a claim without a sentence")
    for key, rule in RULES.items():
        if key in claim:
            try:
                state, why = rule(chapter, claim)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                return Claim("open", f"{says} (the claim cannot be read: {error})")
            return Claim(state, f"{says} ({why})")
    return Claim("open", f"{says} (no rule that checks it)")


def _values(chapter: Chapter, claim: dict[str, Any], modes: list[str]) -> dict[str, float]:
    """The measure of each mode that we have runs of."""
    measure = MEASURES[claim["measure"]][1]
    cells = {mode: _pick(chapter, mode, claim.get("where") or {}, COMPARE_STEPS) for mode in modes}
    found = {mode: measure(chapter, cell) for mode, cell in cells.items() if cell}
    return {mode: value for mode, value in found.items() if value is not None}


def _pick(chapter: Chapter, mode: str, where: dict[str, Any], least: int = 1) -> Cell | None:
    """The cell of a mode with these values and at least so many steps; of several the one with most nodes."""
    mode, _, after = mode.partition("|")
    wanted = {"placement": "after-step" if after else "before-step"} | where
    fits = [c for c in chapter.cells if str(c.spec.mode) == mode and c.n >= least and _fits(c, wanted)]
    return max(fits, key=lambda cell: cell.world, default=None)


def _mode_text(mode: str) -> str:
    return mode.replace("|after", " after the step")


def _fits(cell: Cell, where: dict[str, Any]) -> bool:
    return all(str(value_of(cell, key)) == str(value) for key, value in where.items())


def _rising(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    modes = [str(mode) for mode in claim["rising"]]
    values = _values(chapter, claim, modes)
    if len(values) < len(modes):
        return "open", f"{MISSING} of {', '.join(mode for mode in modes if mode not in values)}"
    rises = all(values[a] < values[b] for a, b in pairwise(modes))
    ours = (" < " if rises else ", ").join(f"{_mode_text(mode)} {values[mode]:.3g}" for mode in modes)
    return ("yes" if rises else "no"), f"ours: {ours}"


def _equal(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    return _gap(chapter, claim, "equal", lambda gap: gap <= float(claim.get("within", 0.02)))


def _apart(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    return _gap(chapter, claim, "apart", lambda gap: gap > float(claim.get("by", 0.1)))


def _gap(chapter: Chapter, claim: dict[str, Any], key: str, holds: Callable[[float], bool]) -> tuple[str, str]:
    """The largest difference between any two modes, as a share of the largest value."""
    names = [str(name) for name in claim[key]]
    measure = MEASURES[claim["measure"]][1]
    values = []
    for name in names:
        cell = _pick(chapter, name, claim.get("where") or {}, COMPARE_STEPS)
        value = measure(chapter, cell) if cell else None
        if value is None:
            return "open", f"{MISSING} of {name}"
        values.append(value)
    gap = (max(values) - min(values)) / max(abs(value) for value in values)
    ours = ", ".join(f"{_mode_text(name)} {value:.3g}" for name, value in zip(names, values, strict=True))
    return ("yes" if holds(gap) else "no"), f"ours: {ours}"


def _goes(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    """Whether the measure goes up, down or stays flat between two values of a key."""
    measure, over = MEASURES[claim["measure"]][1], str(claim["over"])
    ends = []
    for value in (claim["from"], claim["to"]):
        where = (claim.get("where") or {}) | {over: value}
        cell = _pick(chapter, str(claim["mode"]), where, COMPARE_STEPS) or _pick(
            chapter, "single", where, COMPARE_STEPS
        )
        found = measure(chapter, cell) if cell else None
        if found is None:
            return "open", f"{MISSING} of {claim['mode']} with {over} {value}"
        ends.append(found)
    change = ends[1] / ends[0] - 1
    went = "flat" if abs(change) < FLAT else "up" if change > 0 else "down"
    goes = [str(g) for g in (claim["goes"] if isinstance(claim["goes"], list) else [claim["goes"]])]
    return ("yes" if went in goes else "no"), f"ours: {ends[0]:.3g} to {ends[1]:.3g}, {100 * change:+.0f} %"


def _limit(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    modes = [str(mode) for mode in claim["modes"]]
    values = _values(chapter, claim, modes)
    if not values:
        return "open", f"{MISSING} of {', '.join(modes)}"
    below, above = claim.get("below"), claim.get("above")
    holds = [(below is None or v < below) and (above is None or v > above) for v in values.values()]
    return ("yes" if all(holds) else "no"), "ours: " + ", ".join(f"{m} {v:.3g}" for m, v in values.items())


def _busiest(chapter: Chapter, claim: dict[str, Any]) -> tuple[str, str]:
    cell = _pick(chapter, str(claim["mode"]), claim.get("where") or {})
    sent = [float(value or 0.0) for value in cell.sent()] if cell else []
    if not any(sent):
        return "open", "no bytes were counted"
    most = sent.index(max(sent))
    clear = max(sent) > 1.2 * sorted(sent)[-2]
    ours = f"ours: rank {most} sends {max(sent) / 1e6:.0f} MB a step, the next {sorted(sent)[-2] / 1e6:.0f}"
    return ("yes" if most == int(claim["busiest"]) and clear else "no"), ours


RULES = {
    "rising": _rising,
    "equal": _equal,
    "apart": _apart,
    "goes": _goes,
    "below": _limit,
    "above": _limit,
    "busiest": _busiest,
}


def _epoch_loss(cell: Cell, index: int) -> float | None:
    """Training loss of an epoch, mean over ranks; of a step if no epoch was finished."""
    evals = [rank.evals for rank in cell.first.ranks]
    if all(len(each) > 1 for each in evals):
        return _mean([each[index].train_loss for each in evals])
    losses = cell.losses()
    return float(losses[index]) if len(losses) else None


def _total_seconds(cell: Cell) -> float | None:
    """The time of the whole run, mean over ranks; None if a fault was injected into it."""
    return None if cell.disturbed else _mean([rank.end.seconds for rank in cell.first.ranks if rank.end])


def _train_accuracy(cell: Cell) -> float | None:
    known = [rank.evals[-1].train_accuracy for rank in cell.first.ranks if rank.evals]
    return _mean(known)


def _profiled(cell: Cell, key: str) -> float | None:
    """A share that torch.profiler measured, mean over ranks, as in R0; None if it was off (`--profile`)."""
    return _percent(_mean([rank.profile[key] for rank in cell.first.ranks if key in rank.profile]))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else DASH if value is None else str(value)
