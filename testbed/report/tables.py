"""Tables of the report. A table is a header and rows of text, so that the page, Markdown and CSV print the same.

First come the tables of every report (modes, split, bytes, wire, network). Then come those with the rows and columns of
the published experiments: per rank as in R0 (experiments/r0.toml), workers by batch as in R2 (r2.toml), epochs as in R3
(r3.toml), one column per mode as in R4 (r4.toml). The last one is that of faults.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from testbed.report import findings
from testbed.report.load import FaultedRun, Rank
from testbed.report.model import Cell, Chapter, names, value_of
from testbed.results import theory
from testbed.results.faults import HEADER
from testbed.results.receipt import Network
from testbed.results.table import BUSY_MARK, NOTE, busy_footnote, busy_mark, format_table, short_key
from testbed.spec.datasets import dataset_info
from testbed.spec.units import in_megabytes

DASH = "-"
PAYLOADS = ("gradients", "parameters", "buffers", "metrics")
MAX_EPOCHS = 12  # rows of the table per epoch


@dataclass(frozen=True)
class Table:
    """One table. `name`: the name of its file. `note`: how to read it."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False  # the page shows the table after a click
    worded: bool = False  # cells are text: the page aligns cells to the left and breaks lines

    def markdown(self) -> str:
        note = f"\n\n{self.note}" if self.note else ""
        rows = [[as_text(cell) for cell in row] for row in self.rows]
        return f"### {as_text(self.title)}\n\n{format_table(self.header, rows)}{note}\n"

    def csv(self) -> str:
        """Return CSV. A cell that a spreadsheet would run as a formula becomes text; footnote marks are left out."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows(
            [[_no_formula(cell.removesuffix(BUSY_MARK)) for cell in row] for row in [self.header, *self.rows]]
        )
        return out.getvalue()


def as_text(text: str) -> str:
    """Return text for Markdown without HTML in it, because a script's names and lines are not trusted."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _no_formula(cell: str) -> str:
    risky = cell[:1] in "=+@" or (cell[:1] == "-" and cell != DASH and not cell[1:2].isdigit())
    return f"'{cell}" if risky else cell


@dataclass
class Columns:
    """Builds a table with one row per cell: its mode, its values of the keys that vary, then the columns `rest`."""

    chapter: Chapter
    rest: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    @property
    def header(self) -> list[str]:
        varies = self.chapter.keys
        what = "run" if any(cell.spec.script for cell in self.chapter.cells) else "mode"
        return [what, *(short_key(key, varies).replace("_", " ") for key in varies), *self.rest]

    def add(self, cell: Cell, *values: str) -> None:
        varies = [value_of(cell, key) for key in self.chapter.keys]
        self.rows.append([cell.label, *(DASH if v is None else str(v) for v in varies), *values])


def number(value: float | None, form: str = ".3f") -> str:
    return DASH if value is None else format(value, form)


def share(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def modes(chapter: Chapter) -> Table:
    """Return the table of seconds per step with their interval, speed-up, test loss and accuracy."""
    first = ("s/iter", "95 % interval", "mean", "p95", "n", "speed-up", f"{chapter.unit}/s")
    rest = (*first, "test loss", "accuracy", "replicas")
    noted = bool(chapter.unmeasured) or any(cell.note for cell in chapter.cells)
    made = Columns(chapter, (*rest, NOTE) if noted else rest)
    for cell in chapter.cells:
        s, run = cell.seconds, cell.first.summary
        trained = [] if cell.spec.mode.is_control else cell.runs  # ranks of a control run train different models
        losses = [r.summary.test_loss for r in trained if r.summary.test_loss is not None]
        right = [r.summary.test_accuracy for r in trained if r.summary.test_accuracy is not None]
        agree = DASH if cell.spec.mode.silent else {True: "equal", False: "differ", None: DASH}[run.replicas_agree]
        made.add(
            cell,
            number(s.centre) + busy_mark([r.summary for r in cell.runs]),
            f"{s.low:.3f} to {s.high:.3f}",
            number(s.mean),
            number(s.p95),
            str(s.n),
            number(chapter.speed_up(cell), ".2f"),
            number(cell.images_per_second, ".1f"),
            number(statistics.fmean(losses) if losses else None),
            share(statistics.fmean(right) if right else None),
            agree,
            *([cell.note or DASH] if noted else []),
        )
    for cell in chapter.unmeasured:
        made.add(cell, *[DASH] * len(rest), cell.note)
    busy = busy_footnote([r.summary for cell in chapter.cells for r in cell.runs])
    note = f"{findings.MODES} {busy}." if busy else findings.MODES
    title = "What a step costs" if any(cell.spec.script for cell in chapter.cells) else "What each mode costs"
    return Table("modes", title, made.header, made.rows, note)


def split(chapter: Chapter) -> Table:
    """Return the table of the parts of a step, and of the rank that the others wait for."""
    rest = (
        *("step", "compute", "copies", "exposed", "rest", "hidden", "hidden share"),
        *("waiting", "transfer", "last to join"),
    )
    made = Columns(chapter, rest)
    for cell in chapter.cells:
        s, w = cell.split, cell.waiting
        slowest = w.slowest
        last = DASH if slowest is None else f"rank {slowest} ({100 * w.last[slowest]:.0f} %)"
        silent = not w.exchanges
        made.add(
            cell,
            number(s.step),
            *(number(v) if cell.spec.spans else DASH for v in (s.compute, s.copies, s.exposed, s.rest, s.hidden)),
            share(s.hidden_share),
            DASH if silent else number(statistics.fmean(w.waiting)),
            DASH if silent else number(statistics.fmean(w.transfer)),
            last,
        )
    return Table("split", "The parts of a step", made.header, made.rows, findings.SPLIT)


def traffic(chapter: Chapter) -> Table | None:
    """Return the table of the bytes that the kernel counted, the payload in theory, and the shares by kind."""
    rest = (
        "sent, rank 0",
        "theory",
        "sent, others",
        "theory ",
        "sent / theory",
        "received, rank 0",
        "received, others",
        *PAYLOADS,
        "headers and control",
        "before step 1",
    )
    made = Columns(chapter, rest)
    for cell in (cell for cell in chapter.cells if any(cell.sent()) and not cell.spec.mode.silent):
        sent, received, needed = cell.sent(), cell.received(), cell.needed()
        made.add(
            cell,
            _mb(sent[0]),
            _mb(needed[0]),
            _mb(_mean(sent[1:])),
            _mb(_mean(needed[1:])),
            number(cell.sent_over_theory(), ".3f"),
            _mb(received[0] if received else None),
            _mb(_mean(received[1:])),
            *payload_shares(cell),
        )
    note = findings.TRAFFIC + (findings.OBSERVED if any(cell.observed for cell in chapter.cells) else "")
    return Table("bytes", "Bytes against theory", made.header, made.rows, note) if made.rows else None


def payload_shares(cell: Cell) -> list[str]:
    """Return, of the last attempt, shares of the bytes from its first step on by kind, the rest, and MB before it."""
    ends = [rank.end for rank in cell.first.ranks if rank.end]
    before = [end.before or 0 for end in ends]
    whole = sum(end.sent or 0 for end in ends) - sum(before)
    sums = [sum(end.payload.get(kind, 0) for end in ends) for kind in PAYLOADS]
    if whole <= 0 or not any(sums):
        return [DASH] * (len(PAYLOADS) + 2)
    shares = [_small(value / whole) for value in [*sums, max(0.0, whole - sum(sums))]]
    return [*shares, _mb(statistics.fmean(before))]


def wire(chapter: Chapter) -> Table | None:
    """Return the table of the time of communication, its lower bound, and the usual bandwidths; None without rows."""
    rest = (
        "bound",
        "bound s",
        "measured s",
        "ratio",
        "R2's log2(N) S/B",
        "algorithm MB/s",
        "bus MB/s",
        "link utilisation",
    )
    made = Columns(chapter, rest)
    for cell in (cell for cell in chapter.cells if cell.split.busy > 0):
        least, busy = cell.bound, cell.split.busy
        known = theory.cost(cell.spec.mode, cell.world, cell.first.network.rack_uplinks)
        size = cell.buffers[1] * cell.syncs
        rate = cell.first.network.slowest if cell.observed is None else None
        bus = size / busy / 1e6 * 2 * (cell.world - 1) / cell.world if cell.observed is None else None
        made.add(
            cell,
            known.formula if known else "its collectives" if cell.observed is not None else DASH,
            number(least),
            number(busy),
            number(busy / least if least else None, ".2f"),
            number(theory.log2(cell.world) * size / rate if rate else None),
            number(size / busy / 1e6, ".1f"),
            number(bus, ".1f"),
            share(utilisation(cell)),
        )
    note = findings.WIRE + (findings.OBSERVED if any(cell.observed for cell in chapter.cells) else "")
    return Table("wire", "Time against the lower bound", made.header, made.rows, note) if made.rows else None


def utilisation(cell: Cell) -> float | None:
    """Return the utilisation of the busiest rank's link during communication; None if no link was measured.

    For a rank without a measured rate the rate of the fastest link is used.
    """
    network, busy = cell.first.network, cell.split.busy
    fastest = max(network.measured.values(), default=0.0)
    if not fastest or not busy:
        return None
    loads = [(rank, float(v or 0)) for way in (cell.sent(), cell.received()) for rank, v in enumerate(way)]
    return (
        max((load / busy / (network.node(rank, network.measured) or fastest) for rank, load in loads), default=0.0)
        or None
    )


def _uplinks(found: Network) -> str:
    """Return the slowest and the fastest uplink in Mbit/s, each measured with all pairs across racks at once."""
    rates = [rate * 8e-6 for rate in found.uplinks_measured]
    return f"{min(rates):.1f} to {max(rates):.1f}" if rates else DASH


def _ways(found: Network) -> list[str]:
    """Return the requested and the measured round trips, shortest to longest, and how many packets were lost."""
    if not found.ways:
        return [DASH] * 3
    trips = [[1000 * way.rtt_requested for way in found.ways], [1000 * way.rtt for way in found.ways]]
    lost, packets = sum(way.lost for way in found.ways), sum(way.packets for way in found.ways)
    words = [f"{low:.1f}" if high - low < 0.05 else f"{low:.1f} to {high:.1f}" for low, high in map(_ends, trips)]
    return [*words, f"{lost} of {packets}" if packets else DASH]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def network(chapter: Chapter) -> Table | None:
    """Return the table of requested and measured rates, of the first run of each cell; None without a measurement."""
    racked = any(cell.first.network.uplinks for cell in chapter.cells)
    columns = ("requested Mbit/s", "slowest measured", "fastest measured", "worst error", "links")
    far = any(cell.first.network.ways for cell in chapter.cells)
    added = ("round trips requested (ms)", "measured", "packets lost") if far else ()
    made = Columns(chapter, (*columns, *(("uplinks measured",) if racked else ()), *added))
    for cell in chapter.cells:
        found = cell.first.network
        measured = list(found.measured.values())
        if measured:
            rates = sorted({round(rate * 8e-6, 3) for rate in found.requested.values()})
            made.add(
                cell,
                " and ".join(f"{rate:g}" for rate in rates) or "nothing",
                number(min(measured) * 8e-6, ".1f"),
                number(max(measured) * 8e-6, ".1f"),
                DASH if found.worst_error is None else f"{100 * found.worst_error:+.2f} %",
                f"{len(measured)} of {found.sampled_from}" if found.sampled_from else str(len(measured)),
                *([_uplinks(found)] if racked else []),
                *(_ways(found) if far else []),
            )
    return (
        Table("network", "The network, requested and measured", made.header, made.rows, findings.NETWORK, folded=True)
        if made.rows
        else None
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mb(value: float | None) -> str:
    return DASH if value is None else in_megabytes(value, 2)


def _small(value: float) -> str:
    return f"{100 * value:.2f} %" if value >= 0.0001 or value <= 0 else "< 0.01 %"


def ranks(chapter: Chapter) -> Table:
    """Return a table as in R0: losses, accuracy and times of every rank."""
    profiled = any(rank.profile for cell in chapter.cells for rank in cell.first.ranks)
    shares = ("profiler: compute", "communication", "other") if profiled else ()
    rest = ("rank", "loss at 20", "loss at 40", "mean loss", "train accuracy", "test accuracy", "correct", "s/iter")
    made = Columns(chapter, (*rest, "compute", "waiting", *shares))
    for cell in chapter.cells:
        for rank, kept in zip(cell.first.ranks, cell.steps, strict=True):
            last = rank.evals[-1] if rank.evals else None
            profile = (
                [share(rank.profile.get(key)) for key in ("compute", "communication", "other")] if profiled else []
            )
            made.add(
                cell,
                str(rank.number),
                *(number(loss_at(rank, step)) for step in (20, 40)),
                number(float(rank.steps.loss.mean())),
                share(last.train_accuracy if last else None),
                share(last.correct / last.images if last and last.images else None),
                f"{last.correct} of {last.images}" if last and last.images else DASH,
                number(float(kept.total.mean())),
                number(float(kept.compute.mean())) if cell.spec.spans else DASH,
                number(cell.waiting.waiting[rank.number]) if cell.waiting.exchanges else DASH,
                *profile,
            )
    return Table("ranks", "All ranks", made.header, made.rows, findings.RANKS, folded=True)


def loss_at(rank: Rank, step: int) -> float | None:
    """Return the loss of a rank's step, counted from 1; None if there is no such step."""
    return float(rank.steps.loss[step - 1]) if len(rank.steps.loss) >= step else None


def workers_by_batch(chapter: Chapter) -> list[Table]:
    """Return tables as in R2: time and speed-up, compute and communication, bandwidth, by workers and batch."""
    cells = [cell for cell in chapter.cells if not cell.spec.mode.is_control and not cell.spec.script]
    batches = sorted({cell.spec.local_batch(0) for cell in cells})
    workers = sorted({cell.world for cell in cells})
    if len(batches) < 2 or len(workers) < 2 or not cells[0].spec.batch_per_rank:
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
        return Table(name, title, header, rows, findings.EPOCH_TIME)

    def time(cell: Cell) -> list[str]:
        return [number(epoch_seconds(cell), ".1f"), number(weak_speed_up(chapter, cell), ".2f")]

    def parts(cell: Cell) -> list[str]:
        known = (cell.split.compute, cell.split.busy) if cell.spec.spans else (None, None)
        return [number(times(epoch_steps(cell), each), ".1f") for each in known]

    def bandwidth(cell: Cell) -> list[str]:
        return [number(bandwidth_used(cell), ".1f"), share(utilisation(cell))]

    return [
        made("workers-time", "Workers and batch: time of an epoch", ("s", "speed-up"), time, 1),
        made("workers-split", "Workers and batch: compute and communication", ("compute s", "comm. s"), parts, 2),
        made("workers-bandwidth", "Workers and batch: bandwidth", ("MB/s, all ranks", "of the link"), bandwidth, 2),
    ]


def weak_speed_up(chapter: Chapter, cell: Cell) -> float | None:
    """Return the speed-up in images per second over one worker with the same batch; None if it is not known."""
    cells = [c for c in chapter.cells if c.world == 1 and not c.spec.script]
    alike = (c for c in cells if c.spec.local_batch(0) == cell.spec.local_batch(0))
    single = next((c for c in alike if (c.substrate, c.machine) == (cell.substrate, cell.machine)), None)
    ours, base = cell.images_per_second, single.images_per_second if single else None
    return ours / base if ours and base else None


def bandwidth_used(cell: Cell) -> float | None:
    """Return the MB/s that all ranks together sent during communication; None without any."""
    sent = sum(float(value or 0) for value in cell.sent())
    return sent / cell.split.busy / 1e6 if cell.split.busy and sent else None


def epoch_steps(cell: Cell) -> float | None:
    """Return the steps of an epoch of our own loop; None if the data set is a file of the user, of unknown size."""
    images = cell.spec.data.subset or dataset_info(cell.spec.data.name).train
    return None if images is None else images / cell.spec.global_batch


def epoch_seconds(cell: Cell) -> float | None:
    """Return the seconds of an epoch of our own loop, extrapolated from its steps; None if they are not known."""
    return times(epoch_steps(cell), cell.seconds.centre)


def times(one: float | None, other: float | None) -> float | None:
    """Return the product; None if a factor is None."""
    return None if one is None or other is None else one * other


def epochs(chapter: Chapter) -> Table | None:
    """Return a table as in R3: loss and accuracy per epoch, mean over ranks, and the training time of each mode."""
    cells = [cell for cell in chapter.cells if len({e.epoch for e in cell.first.ranks[0].evals}) > 1]
    if not cells:
        return None
    last = min(len(cell.first.ranks[0].evals) for cell in cells)
    chosen = sorted({round(k * (last - 1) / (min(MAX_EPOCHS, last) - 1)) for k in range(min(MAX_EPOCHS, last))})
    header = ["epoch", *(f"{name}: {what}" for name in names(cells) for what in ("loss", "accuracy"))]
    rows = []
    for index in chosen:
        row = [str(cells[0].first.ranks[0].evals[index].epoch + 1)]
        for cell in cells:
            evals = [rank.evals[index] for rank in cell.first.ranks if index < len(rank.evals)]
            row += [number(statistics.fmean(e.train_loss for e in evals))]
            row += [share(statistics.fmean(e.train_accuracy for e in evals))]
        rows.append(row)
    total = ["seconds of training"]
    for cell in cells:
        times = [rank.end.seconds for rank in cell.first.ranks if rank.end]
        total += [DASH if cell.disturbed else f"{min(times):.1f} to {max(times):.1f}", DASH]
    note = "Training loss and accuracy of each epoch, mean over ranks. Seconds: the fastest and the slowest rank."
    return Table("epochs", "Epoch by epoch", header, [*rows, total], note)


def compact(chapter: Chapter) -> Table | None:
    """Return a table as in R4, with one column per mode; None if there are too few or too many cells."""
    if len(chapter.cells) < 2 or len(chapter.cells) > 8:
        return None
    cells = chapter.cells
    rows = [
        ["accuracy", *(share(cell.first.summary.test_accuracy) for cell in cells)],
        ["s/iter", *(number(cell.seconds.centre) for cell in cells)],
        ["loss", *(number(float(cell.losses()[-1]) if len(cell.losses()) else None) for cell in cells)],
        ["speed-up", *(number(chapter.speed_up(cell), ".2f") for cell in cells)],
    ]
    return Table("compact", "Summary", ["", *names(cells)], rows, "Loss is of the last step.", folded=True)


def faults(runs: Sequence[FaultedRun]) -> Table:
    """Return the table of injected faults: when the ranks detected each, and how the run ended."""
    return Table("faults", "Injected faults", list(HEADER), [list(run.row) for run in runs], findings.FAULTS)
