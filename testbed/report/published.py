"""Compare our runs with published figures, and check whether the published findings were reproduced.

An experiment file has `[published]` tables of figures, one per measure (MEASURES, RANK_MEASURES). Keys are modes; modes
and ranks, `gather = { 0 = 3.7764 }`; or numbers of workers and images of each worker, `4 = { 32 = 3.54 }`.
`mistakes` are sentences on what is wrong in the published figures.

`[[published.shape]]` are claims: a sentence (`says`) and the rule that checks it on our runs:

    rising = ["gather", "allreduce", "ddp"]         measure = "speed_up" rises in this order
    equal = ["allreduce", "ring"]  within = 0.02    measure = "last_loss" is equal, within a share of it
    apart = ["ring", "ring|after"]  by = 0.1        it differs by more; `|after`: synchronised after the step
    goes = "up"  mode = "gather"  over = "nodes"  from = 3  to = 4       (or "down", "flat", a list of them)
    below = 1.0  modes = ["gather", "ddp"]          (or `above`)
    busiest = 0  mode = "gather"                    this rank sends most

`where = { placement = "after-step" }` selects runs by any key of the spec. A claim that our runs cannot decide is open.

`[published.explain]` names a measure that no claim explains, and `[[published.explanation]]` what could explain it: a
sentence, and for each published row the keys of the runs that show it. The report has the distance of each
explanation to the published figures (`distance`), and says which is nearest, and whether all of its rows are `within`:

    [published.explain]  measure = "slowdown"  within = 0.1  same = ["link.rate"]
    [[published.explanation]]  says = "a slower network"  gather = { "link.rate" = "50mbit" }  ddp = { ... }

`same` are keys that are equal in all runs of an explanation. Of several runs that fit a row the nearest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    loss_at,
    times,
    weak_speed_up,
)

MISSING = f"no run with {COMPARE_STEPS} steps or more"
FLAT = 0.05  # a change smaller than this share counts as flat
MEASURES: dict[str, tuple[str, Callable[[Chapter, Cell], float | None]]] = {
    "seconds_per_step": ("s/iter", lambda chapter, cell: cell.seconds.centre),
    "slowdown": ("s/iter over one node's", lambda chapter, cell: _slowdown(chapter, cell)),
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
    "train_accuracy_percent": ("train accuracy %", lambda chapter, cell: _percent(_train_accuracy(cell, -1))),
    "first_train_accuracy_percent": ("first accuracy %", lambda chapter, cell: _percent(_train_accuracy(cell, 0))),
    "first_epoch_seconds": ("s, first epoch", lambda chapter, cell: _seconds_of_epoch(cell, 0)),
    "second_epoch_seconds": ("s, second epoch", lambda chapter, cell: _seconds_of_epoch(cell, 1)),
}
RANK_MEASURES: dict[str, tuple[str, Callable[[Cell, int], float | None]]] = {
    "loss_at_20": ("loss at 20", lambda cell, rank: loss_at(cell.first.ranks[rank], 20)),
    "loss_at_40": ("loss at 40", lambda cell, rank: loss_at(cell.first.ranks[rank], 40)),
    "mean_loss": ("mean loss", lambda cell, rank: float(cell.first.ranks[rank].steps.loss.mean())),
    "rank_train_accuracy_percent": (
        "train accuracy %",
        lambda cell, rank: _percent(_last(cell, rank, "train_accuracy")),
    ),
    "rank_last_loss": ("last loss", lambda cell, rank: _last(cell, rank, "train_loss")),
    "rank_test_accuracy_percent": ("test accuracy %", lambda cell, rank: _test_percent(cell, rank)),
    "rank_seconds_per_step": ("s/iter", lambda cell, rank: cell.per_rank("total")[rank]),
}
Curve = dict[int, float]
CURVES: dict[str, tuple[str, Callable[[Cell], Curve]]] = {  # by mode; a curve is published as { epoch = value }
    "loss_curve": ("loss by epoch", lambda cell: _loss_curve(cell)),
}


@dataclass(frozen=True)
class Published:
    """A sentence for each claim, the figures side by side, and what is wrong in those that were published."""

    sentences: list[Claim]
    tables: list[Table] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    note: str = ""


def published(chapter: Chapter) -> Published | None:
    """None if the experiment has no published figures."""
    figures = chapter.experiment.published if chapter.experiment else {}
    if not figures:
        return None
    made = [_table(chapter, figures), _rank_table(chapter, figures), *_fit_tables(chapter, figures)]
    mistakes = [str(each) for each in figures.get("mistakes") or []]
    return Published(claims(chapter), [table for table in made if table.rows], mistakes, _note(figures))


@states(steps=1, otherwise=[])
def claims(chapter: Chapter) -> list[Claim]:
    """Each published finding with its state, and first how many of those that our runs decide hold here."""
    shape = (chapter.experiment.published if chapter.experiment else {}).get("shape") or []
    found = [_judge(chapter, claim) for claim in shape if isinstance(claim, dict)]
    decided = [claim for claim in found if claim.state != "open"]
    good = sum(claim.state == "yes" for claim in decided)
    whole = "yes" if good == len(decided) else "no"
    heads = [Claim(whole, f"{good} of {len(decided)} published findings hold here.")] if decided else []
    return [*heads, *found, *_nearest(chapter)]


def _table(chapter: Chapter, figures: dict[str, Any]) -> Table:
    """One row per mode or cell of a grid, and for each measure a column of published figures and one of ours."""

    def ours(key: str, name: str) -> float | None:
        cell = _pick(chapter, name, {}) or _in_grid(chapter, name)
        return MEASURES[key][1](chapter, cell) if cell else None

    titles = {key: title for key, (title, _) in MEASURES.items()}
    return Table("published", "Published and ours", *_side_by_side(figures, titles, _grid_name, ours), _note(figures))


def _rank_table(chapter: Chapter, figures: dict[str, Any]) -> Table:
    """The same for every rank."""

    def ours(key: str, name: str) -> float | None:
        mode, _, rank = name.partition(", rank ")
        cell = _pick(chapter, mode, {})
        return RANK_MEASURES[key][1](cell, int(rank or 0)) if cell and int(rank or 0) < cell.world else None

    titles = {key: title for key, (title, _) in RANK_MEASURES.items()}
    found = _side_by_side(figures, titles, lambda mode, rank: f"{mode}, rank {rank}", ours)
    return Table("published-ranks", "Published and ours, rank by rank", *found)


def _side_by_side(
    figures: dict[str, Any],
    titles: dict[str, str],
    name: Callable[[str, str], str],
    ours: Callable[[str, str], float | None],
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of those measures that are published. `name`: of a row with two keys."""
    measures = [key for key in figures if key in titles and isinstance(figures[key], dict)]
    theirs = {key: _rows(figures[key], name) for key in measures}
    names = list(dict.fromkeys(row for key in measures for row in theirs[key]))
    header = ["", *(f"{titles[key]}, {whose}" for key in measures for whose in ("published", "ours"))]
    return header, [
        [row, *(text for key in measures for text in (_exact(theirs[key].get(row)), _text(ours(key, row))))]
        for row in names
    ]


def _rows(figures: dict[str, Any], name: Callable[[str, str], str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in figures.items():
        rows |= (
            {name(key, inner): each for inner, each in value.items()} if isinstance(value, dict) else {str(key): value}
        )
    return rows


def _note(figures: dict[str, Any]) -> str:
    where = str(figures.get("source") or "the report")
    return f"Published: {where}. On other machines, so seconds differ; order, ratios and bottleneck should be the same."


def _grid_name(workers: str, batch: str) -> str:
    return f"{workers} workers, batch {batch}"


def _in_grid(chapter: Chapter, name: str) -> Cell | None:
    """The cell that is named `4 workers, batch 32`."""
    named = {_grid_name(str(cell.world), str(cell.spec.local_batch(0))): cell for cell in chapter.cells}
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


# --- explanations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The runs of an explanation that are nearest to the published figures. Distances are by published row."""

    says: str
    cells: dict[str, Cell]
    distances: dict[str, float]
    same: dict[str, Any]  # values of the keys that all of its runs share

    @property
    def distance(self) -> float:
        """Over all rows, each with the same weight."""
        return math.sqrt(sum(each**2 for each in self.distances.values()) / len(self.distances))


def _fits_of(chapter: Chapter, figures: dict[str, Any]) -> list[Fit]:
    """The nearest runs of every explanation that has runs for all of its rows, the nearest explanation first."""
    explain, listed = figures.get("explain"), figures.get("explanation")
    if not isinstance(explain, dict) or not isinstance(listed, list):
        return []
    theirs = figures.get(str(explain.get("measure"))) or {}
    fits = [_nearest_runs(chapter, explain, theirs, each) for each in listed if isinstance(each, dict)]
    return sorted((fit for fit in fits if fit), key=lambda fit: fit.distance)


def _nearest_runs(
    chapter: Chapter, explain: dict[str, Any], theirs: dict[str, Any], explanation: dict[str, Any]
) -> Fit | None:
    keys = [str(key) for key in explain.get("same") or []]
    rows = {row: where for row, where in explanation.items() if row != "says" and row in theirs}
    found: list[Fit] = []
    for same in {tuple(str(value_of(cell, key)) for key in keys) for cell in chapter.cells}:
        shared = dict(zip(keys, same, strict=True))
        nearest = {}
        for row, where in rows.items():
            cells = [cell for cell in chapter.cells if _fits(cell, {"mode": row} | where) and _fits(cell, shared)]
            apart = [(distance(chapter, cell, explain, theirs[row]), cell) for cell in cells]
            known = [(value, cell) for value, cell in apart if value is not None]
            if known:
                nearest[row] = min(known, key=lambda pair: pair[0])
        if rows and len(nearest) == len(rows):
            cells_of, distances = (
                {row: each[1] for row, each in nearest.items()},
                {row: each[0] for row, each in nearest.items()},
            )
            found.append(Fit(str(explanation.get("says")), cells_of, distances, shared))
    return min(found, key=lambda fit: fit.distance, default=None)


def distance(chapter: Chapter, cell: Cell, explain: dict[str, Any], theirs: Any) -> float | None:
    """How far ours is from a published figure, as a share of it; of a curve the root mean square of the differences."""
    measure = str(explain["measure"])
    if measure in CURVES:
        ours = CURVES[measure][1](cell)
        differences = [ours[int(epoch)] - value for epoch, value in theirs.items() if int(epoch) in ours]
        whole = len(differences) == len(theirs)
        return math.sqrt(sum(each**2 for each in differences) / len(differences)) if whole and differences else None
    value = MEASURES[measure][1](chapter, cell)
    return None if value is None else abs(value / theirs - 1)


def _nearest(chapter: Chapter) -> list[Claim]:
    """Which explanation is nearest, and whether it is near enough."""
    figures = chapter.experiment.published if chapter.experiment else {}
    if not isinstance(figures.get("explain"), dict):
        return []
    within, fits = float(figures["explain"].get("within", 0.1)), _fits_of(chapter, figures)
    if not fits:
        return [Claim("open", "which explanation fits best (runs are missing)")]
    best, others = fits[0], fits[1:]
    each = ", ".join(f"{value:.2f} of {row}" for row, value in best.distances.items())
    text = f"{best.says} (distance {each}; at most {within:g} fits"
    text += f"; the next is {others[0].says}, {others[0].distance / best.distance:.2g} times as far)" if others else ")"
    near = all(value <= within for value in best.distances.values())
    how = "by this explanation, which fits best" if near else "by no explanation that was tried; the nearest is"
    return [Claim("yes" if near else "no", f"{how}: {text}")]


def _fit_tables(chapter: Chapter, figures: dict[str, Any]) -> Iterator[Table]:
    """The distance of every explanation; and of curves their points beside those of the nearest explanation."""
    fits = _fits_of(chapter, figures)
    if not fits:
        return
    rows, keys = list(dict.fromkeys(row for fit in fits for row in fit.distances)), list(fits[0].same)
    header = ["explanation", *keys, *(f"distance, {row}" for row in rows), "together"]
    lines = [
        [
            fit.says,
            *(str(fit.same[key]) for key in keys),
            *(f"{fit.distances[row]:.2f}" if row in fit.distances else DASH for row in rows),
            f"{fit.distance:.2f}",
        ]
        for fit in fits
    ]
    measure = str(figures["explain"]["measure"])
    how = (
        "root mean square of the differences" if measure in CURVES else "difference as a share of the published figure"
    )
    yield Table(
        "explanations", "Explanations and their distance to the published figures", header, lines, f"Distance: {how}."
    )
    if measure in CURVES:
        theirs = {row: {int(epoch): value for epoch, value in figures[measure][row].items()} for row in rows}
        ours = {row: CURVES[measure][1](cell) for row, cell in fits[0].cells.items()}
        epochs = sorted({epoch for row in rows for epoch in theirs[row]})
        points = [
            [
                str(epoch),
                *(
                    text
                    for row in rows
                    for text in (_exact(theirs[row].get(epoch)), _text(ours.get(row, {}).get(epoch)))
                ),
            ]
            for epoch in epochs
        ]
        names = ["epoch", *(f"{row}, {whose}" for row in rows for whose in ("published", "nearest"))]
        yield Table("curves", f"Published {CURVES[measure][0]}, and the nearest explanation", names, points)


# --- rules of claims --------------------------------------------------------------------------------------------------


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
    """Whether the measure changes as claimed (up, down or flat) between two values of a key; open without both runs."""
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


def _train_accuracy(cell: Cell, index: int) -> float | None:
    known = [rank.evals[index].train_accuracy for rank in cell.first.ranks if rank.evals]
    return _mean(known)


def _last(cell: Cell, rank: int, name: str) -> float | None:
    evals = cell.first.ranks[rank].evals
    return float(getattr(evals[-1], name)) if evals else None


def _test_percent(cell: Cell, rank: int) -> float | None:
    evals = cell.first.ranks[rank].evals
    return 100 * evals[-1].correct / evals[-1].images if evals and evals[-1].images else None


def _seconds_of_epoch(cell: Cell, epoch: int) -> float | None:
    """Seconds of all steps of an epoch, mean over ranks; None if it was not finished or a fault was injected."""
    whole = all(any(each.epoch == epoch for each in rank.evals) for rank in cell.first.ranks)
    if cell.disturbed or not whole:
        return None
    return _mean([float(rank.steps.total[rank.steps.epoch == epoch].sum()) for rank in cell.first.ranks])


def _slowdown(chapter: Chapter, cell: Cell) -> float | None:
    """Seconds of a step over those of one node, whatever their batches are."""
    single = _pick(chapter, "single", {})
    return cell.seconds.centre / single.seconds.centre if single else None


def _loss_curve(cell: Cell) -> Curve:
    """Training loss of each epoch, counted from 1, mean over ranks."""
    evals = zip(*(rank.evals for rank in cell.first.ranks), strict=False)
    return {each[0].epoch + 1: sum(e.train_loss for e in each) / len(each) for each in evals}


def _profiled(cell: Cell, key: str) -> float | None:
    """A share that torch.profiler measured, mean over ranks, as in R0; None if it was off (`--profile`)."""
    return _percent(_mean([rank.profile[key] for rank in cell.first.ranks if key in rank.profile]))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _exact(value: Any) -> str:
    """A published figure with all of its digits: a reader compares it with the report."""
    return f"{value:.10g}" if isinstance(value, int | float) else DASH if value is None else str(value)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else DASH if value is None else str(value)
