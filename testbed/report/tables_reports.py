"""Tables in the shape of the course reports: per rank (R0), workers x batch (R2), epochs (R3), compact (R4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from testbed.report import words
from testbed.report.cells import Cell, Chapter
from testbed.report.faults import Faulted
from testbed.report.focus import names
from testbed.report.load import Rank
from testbed.report.tables import DASH, Columns, Table, number, share, utilisation
from testbed.spec.datasets import dataset_info
from testbed.spec.history import HEADER

MOST_EPOCHS = 12  # rows of the table per epoch


def ranks(chapter: Chapter) -> Table:
    """R0: every rank's losses, accuracy and time."""
    profiled = any(rank.profile for cell in chapter.cells for rank in cell.first.ranks)
    shares = ("profiler: compute", "communication", "other") if profiled else ()
    rest = ("rank", "loss at 20", "loss at 40", "mean loss", "train accuracy", "test accuracy", "correct", "s/iter")
    made = Columns(chapter, (*rest, "compute", "waiting", *shares))
    for cell in chapter.cells:
        for rank, kept in zip(cell.first.ranks, cell.steps, strict=True):
            last = rank.evals[-1] if rank.evals else {}
            profile = (
                [share(rank.profile.get(key)) for key in ("compute", "communication", "other")] if profiled else []
            )
            made.add(
                cell,
                str(rank.number),
                *(_loss_at(rank, step) for step in (20, 40)),
                number(float(rank.steps.loss.mean())),
                share(last.get("train_accuracy")),
                share(last["correct"] / last["images"] if last.get("images") else None),
                f"{last['correct']} of {last['images']}" if last.get("images") else DASH,
                number(float(kept.total.mean())),
                number(float(kept.compute.mean())) if cell.spec.spans else DASH,
                number(cell.waiting.waiting[rank.number]) if cell.waiting.exchanges else DASH,
                *profile,
            )
    return Table("ranks", "Every rank", made.header, made.rows, words.RANKS, folded=True)


def _loss_at(rank: Rank, step: int) -> str:
    """The loss of the step-th step, counted from 1."""
    return number(float(rank.steps.loss[step - 1])) if len(rank.steps.loss) >= step else DASH


def workers_by_batch(chapter: Chapter) -> list[Table]:
    """R2: time and speed-up, compute and communication, bandwidth; workers down, batch per worker across."""
    cells = [cell for cell in chapter.cells if not cell.spec.mode.is_control]
    batches = sorted({cell.spec.local_batch(0) for cell in cells})
    workers = sorted({cell.world for cell in cells})
    if len(batches) < 2 or len(workers) < 2 or not chapter.cells[0].spec.batch_per_rank:
        return []
    grid = {(cell.world, cell.spec.local_batch(0)): cell for cell in reversed(cells)}

    def made(name: str, title: str, columns: tuple[str, ...], values: Callable[[Cell], list[str]], least: int) -> Table:
        header = ["workers", *(f"batch {batch}: {column}" for batch in batches for column in columns)]
        empty = [DASH] * len(columns)
        rows = [
            [str(n), *(v for b in batches for v in (values(grid[n, b]) if (n, b) in grid else empty))]
            for n in workers
            if n >= least
        ]
        return Table(name, title, header, rows, words.EPOCH_TIME)

    def time(cell: Cell) -> list[str]:
        return [number(epoch_seconds(cell), ".1f"), number(weak_speed_up(chapter, cell), ".2f")]

    def parts(cell: Cell) -> list[str]:
        steps = epoch_images(cell) / cell.spec.global_batch
        known = (cell.split.compute, cell.split.busy) if cell.spec.spans else (None, None)
        return [number(None if each is None else each * steps, ".1f") for each in known]

    def bandwidth(cell: Cell) -> list[str]:
        return [number(bandwidth_used(cell), ".1f"), share(utilisation(cell))]

    return [
        made("workers-time", "Workers and batch: time of an epoch", ("s", "speed-up"), time, 1),
        made("workers-split", "Workers and batch: compute and communication", ("compute s", "comm. s"), parts, 2),
        made("workers-bandwidth", "Workers and batch: bandwidth", ("MB/s, all ranks", "of the link"), bandwidth, 2),
    ]


def weak_speed_up(chapter: Chapter, cell: Cell) -> float | None:
    """By images per second, over one worker with the same batch per worker."""
    alike = (c for c in chapter.cells if c.world == 1 and c.spec.local_batch(0) == cell.spec.local_batch(0))
    single = next((c for c in alike if c.substrate == cell.substrate), None)
    return cell.images_per_second / single.images_per_second if single else None


def bandwidth_used(cell: Cell) -> float | None:
    """MB/s that all ranks together sent while anything was being communicated."""
    sent = sum(float(value or 0) for value in cell.sent())
    return sent / cell.split.busy / 1e6 if cell.split.busy and sent else None


def epoch_images(cell: Cell) -> int:
    return cell.spec.data.subset or dataset_info(cell.spec.data.name).train


def epoch_seconds(cell: Cell) -> float:
    return epoch_images(cell) / cell.images_per_second


def epochs(chapter: Chapter) -> Table | None:
    """R3: loss and accuracy per epoch, mean over ranks, and each mode's training time."""
    cells = [cell for cell in chapter.cells if len({e.get("epoch") for e in cell.first.ranks[0].evals}) > 1]
    if not cells:
        return None
    last = min(len(cell.first.ranks[0].evals) for cell in cells)
    chosen = sorted({round(k * (last - 1) / (min(MOST_EPOCHS, last) - 1)) for k in range(min(MOST_EPOCHS, last))})
    header = ["epoch", *(f"{name}: {what}" for name in names(cells) for what in ("loss", "accuracy"))]
    rows = []
    for index in chosen:
        row = [str(int(cells[0].first.ranks[0].evals[index]["epoch"]) + 1)]
        for cell in cells:
            evals = [rank.evals[index] for rank in cell.first.ranks if index < len(rank.evals)]
            row += [number(statistics.fmean(float(e["train_loss"]) for e in evals))]
            row += [share(statistics.fmean(float(e["train_accuracy"]) for e in evals))]
        rows.append(row)
    total = ["seconds of training"]
    for cell in cells:
        times = [float(rank.end["seconds"]) for rank in cell.first.ranks]
        total += [f"{min(times):.1f} to {max(times):.1f}", DASH]
    note = "Training loss and accuracy of each epoch, mean over ranks. Seconds: the fastest and the slowest rank."
    return Table("epochs", "Epoch by epoch", header, [*rows, total], note)


def compact(chapter: Chapter) -> Table | None:
    """R4: one column per mode."""
    if len(chapter.cells) < 2 or len(chapter.cells) > 8:
        return None
    cells = chapter.cells
    rows = [
        ["accuracy", *(share(cell.first.summary.test_accuracy) for cell in cells)],
        ["s/iter", *(number(cell.seconds.centre) for cell in cells)],
        ["loss", *(number(float(cell.losses()[-1]) if len(cell.losses()) else None) for cell in cells)],
        ["speed-up", *(number(chapter.speed_up(cell), ".2f") for cell in cells)],
    ]
    return Table("compact", "In short", ["", *names(cells)], rows, "Loss is of the last step.", folded=True)


def faults(runs: Sequence[Faulted]) -> Table:
    """What was done on purpose, who noticed, and what became of it."""
    return Table("faults", "Faults on purpose", list(HEADER), [list(run.row) for run in runs], words.FAULTS)
