"""The section "What this script does" of the page: the records of the observer about a user's script.

The section has the script's collectives by line, its phases, its setup, notes on events that were not observed, and the
findings (script_findings.py). All data is of the first repeat. A script can forge the records of its own process.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.report.model import Cell, Chapter, names
from testbed.report.script_findings import find, read_forked
from testbed.report.stats import seconds
from testbed.report.tables import DASH, Table, as_text, number
from testbed.results.observations import Call, Calls, Files, Finding, Setup, Swap, Unseen
from testbed.results.records import Record
from testbed.results.table import NOT_SEEN, batch_in_words
from testbed.spec.errors import TestbedError, one_line

COLLECTIVES = (
    "Calls from one line of the script in one phase, mean over the ranks that made them. Size: bytes of one call; of"
    " all_gather, reduce_scatter and all_to_all the sum of all parts. In flight: from the call until the result was"
    " there. Blocked: the script waited for the result. Calls before the first step count as calls of that step."
)
PHASES = (
    "Seconds, mean over the steps that count. Sync: from the end of backward to the end of the optimizer's step,"
    " without that step. No phase: work of the script between its phases, e.g. a test, a log line or a checkpoint."
)
SETUP = "As recorded in the script's process at its first step. Where ranks differ, each value names its ranks."


@dataclass(frozen=True)
class ScriptPart:
    """The section of one script."""

    cell: Cell
    slug: str
    title: str
    findings: list[Finding]  # errors first
    notes: list[str]
    tables: list[Table]
    quiet: tuple[str, ...] = ("Certainty", "Refuted by")  # details that the page prints in a muted colour
    nothing_found: str = "No rule found a mistake or an avoidable cost in this script."
    rows: list[dict[str, Any]] = field(default_factory=list)  # the table of collectives as numbers

    def markdown(self) -> str:
        lines = [f"### {as_text(self.title)}", ""]
        for each in self.findings:
            lines.append(as_text(f"- **{each.severity}**: {each.title}{f' ({each.site})' if each.site else ''}"))
            lines += [as_text(f"  {name}: {text}") for name, text in details(each)]
        lines += [] if self.findings else [self.nothing_found]
        return "\n".join([*lines, "", *map(as_text, self.notes), "", *(table.markdown() for table in self.tables)])

    def details(self, finding: Finding) -> list[tuple[str, str]]:
        return details(finding)

    def figures(self) -> dict[str, Any]:
        """Return the content of report.json for this script."""
        return {
            "findings": [asdict(each) for each in self.findings],
            "collectives": self.rows,
            "notes": self.notes,
            "setup": [asdict(setup) for setup in _setups(self.cell)],
            "images": self.cell.first.summary.images,
            "batches": self.cell.first.summary.batches,
        }


def script_parts(chapter: Chapter) -> list[ScriptPart]:
    """Return one section for every cell of a user's script."""
    cells = [cell for cell in chapter.cells if cell.spec.script is not None]
    return [_part(cell, name, number) for number, (cell, name) in enumerate(zip(cells, names(cells), strict=True), 1)]


def _part(cell: Cell, name: str, place: int) -> ScriptPart:
    slug = f"script-{place}"
    rows = collectives(cell)
    tables = [_collectives_table(rows, slug), _phases_table(cell, slug), _setup_table(cell, slug)]
    return ScriptPart(
        cell=cell,
        slug=slug,
        title=f"What this script does: {name}",
        findings=_findings(cell),
        notes=[*_changed(cell), *_swapped(cell), *_sampled(cell), *_written(cell), *_unseen(cell)],
        tables=[table for table in tables if table],
        rows=rows,
    )


def _findings(cell: Cell) -> list[Finding]:
    forked: dict[int, list[list[Record]]] = {}
    with suppress(TestbedError, OSError):  # a file of a forked rank is damaged: forked ranks are not compared
        forked = read_forked(cell.first.folder, cell.spec)
    return find({rank.number: rank.records for rank in cell.first.ranks}, cell.spec, forked)


def details(finding: Finding) -> list[tuple[str, str]]:
    """Return the details of a finding as pairs (name, text): evidence, cost, fix, ... Leave out empty ones."""
    cost = seconds(finding.seconds) + " a step" if finding.seconds else ""
    named = {"Evidence": finding.evidence, "Costs": cost, "Fix": finding.fix}
    named |= {"Certainty": finding.sure, "Refuted by": finding.refuted_by}
    return [(name, text) for name, text in named.items() if text]


def collectives(cell: Cell) -> list[dict[str, Any]]:
    """Return one row per operation, line, phase, caller, root and group: means per step over the ranks that called."""
    found: dict[tuple[str, ...], list[tuple[int, Call, int]]] = {}
    for rank in cell.first.ranks:
        last = next((record for record in reversed(rank.records) if isinstance(record, Calls)), None)
        for row in last.rows if last else []:
            whose = (str(row.detail.get("root", 0)), " ".join(map(str, _listed(row.detail.get("ranks")))))
            key = (row.operation, row.site, row.phase, row.by, *whose)
            found.setdefault(key, []).append((rank.number, row, last.last - last.first + 1 if last else 1))
    return [_merged(key, own) for key, own in sorted(found.items(), key=lambda pair: _first_bytes(pair[1]))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first_bytes(own: Sequence[tuple[int, Call, int]]) -> float:
    """Return the sort key of a row: rows with most bytes come first."""
    return -max(row.bytes for _, row, _ in own)


def _merged(key: tuple[str, ...], own: Sequence[tuple[int, Call, int]]) -> dict[str, Any]:
    operation, site, phase, by, root, group = key

    def per_step(name: str) -> float:
        return statistics.fmean(getattr(row, name) / steps for _, row, steps in own)

    calls = sum(row.count for _, row, _ in own)
    return {
        "operation": operation,
        "site": site,
        "phase": phase,
        "by": by,
        "root": int(root) if root.isdecimal() else 0,
        "group": group,
        "ranks": [rank for rank, *_ in own],
        "calls_per_step": per_step("count"),
        "bytes_per_call": sum(row.bytes for _, row, _ in own) / calls if calls else 0.0,
        "smallest": min(_sizes_in(own, "smallest"), default=None),
        "largest": max(_sizes_in(own, "largest"), default=None),
        "in_flight_seconds_per_step": per_step("seconds"),
        "blocked_seconds_per_step": per_step("blocked"),
    }


def _sizes_in(own: Sequence[tuple[int, Call, int]], name: str) -> list[float]:
    """Return the values of this key that are numbers, because a script can forge `detail`."""
    return [value for _, row, _ in own if isinstance(value := row.detail.get(name), int | float)]


def _collectives_table(rows: Sequence[dict[str, Any]], slug: str) -> Table | None:
    header = ["operation", "line", "phase", "by", "ranks", "calls per step", "size", "in flight ms", "blocked ms"]
    made = []
    for row in rows:
        operation = row["operation"] + (f", root {row['root']}" if row["root"] else "")
        operation += f", group {row['group']}" if row["group"] else ""
        made.append(
            [
                operation,
                row["site"] or DASH,
                row["phase"] or DASH,
                row["by"] or DASH,
                ranges(row["ranks"]),
                f"{row['calls_per_step']:.3g}",
                _sizes(row),
                number(1e3 * row["in_flight_seconds_per_step"], ".2f"),
                number(1e3 * row["blocked_seconds_per_step"], ".2f"),
            ]
        )
    return Table(f"{slug}-collectives", "The script's collectives", header, made, COLLECTIVES) if made else None


def _sizes(row: dict[str, Any]) -> str:
    """Return the size of a row's calls, e.g. `1.5 MB`, or `4 B to 1.5 MB` if they differ."""
    small, large = row["smallest"], row["largest"]
    if isinstance(small, int | float) and isinstance(large, int | float) and small < large:
        return f"{size_in_words(small)} to {size_in_words(large)}"
    return size_in_words(row["bytes_per_call"])


def size_in_words(size: float) -> str:
    """Return bytes as text: 8 -> `8 B`, 1_500_000 -> `1.5 MB`."""
    unit, scale = ("MB", 1e6) if size >= 1e6 else ("kB", 1e3) if size >= 1e3 else ("B", 1)
    return f"{size / scale:.3g} {unit}"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as text: [0, 1, 2, 5] -> `0-2, 5`."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _phases_table(cell: Cell, slug: str) -> Table:
    header = ["rank", "step", "data", "forward", "backward", "sync", "update", "no phase", "blocked", "images"]
    rows = []
    for rank, steps in enumerate(cell.steps):
        inside = steps.data + steps.forward + steps.backward + steps.sync
        columns = (steps.total, steps.data, steps.forward, steps.backward, steps.sync - steps.update, steps.update)
        means = [float(column.mean()) for column in (*columns, steps.total - inside, steps.blocked)]
        images = batch_in_words(cell.first.summary, rank)
        rows.append([str(rank), *(number(max(0.0, mean), ".4f") for mean in means), images])
    return Table(f"{slug}-phases", "The script's phases", header, rows, PHASES)


def _setups(cell: Cell) -> list[Setup]:
    first = (next((r for r in rank.records if isinstance(r, Setup)), None) for rank in cell.first.ranks)
    return [setup for setup in first if setup]


def _setup_table(cell: Cell, slug: str) -> Table | None:
    setups = _setups(cell)
    if not setups:
        return None
    values: dict[str, list[str]] = {}
    for setup in setups:
        own = {
            "process group": f"{setup.backend}, {setup.world} ranks" if setup.backend else "none",
            "wrappers": "; ".join(f"{name} ({_options(kept)})" for name, kept in setup.wrappers.items()) or "none",
            "optimizers": ", ".join(setup.optimizers) or "none",
            "threads of torch": _threads(setup.threads, cell.spec.threads),
            **{name: _option(value) for name, value in setup.detail.items()},
        }
        for key, value in own.items():
            values.setdefault(one_line(key), []).append(one_line(value))
    rows = [[key, _by_rank(found)] for key, found in values.items()]
    return Table(f"{slug}-setup", "The script's setup", ["what", "value"], rows, SETUP, worded=True)


def _threads(chosen: int, requested: int) -> str:
    own = f", by its own choice; requested {requested}" if chosen and chosen != requested else ""
    return f"{chosen or NOT_SEEN}{own}"


def _by_rank(values: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return values[0]
    owners = {value: [rank for rank, own in enumerate(values) if own == value] for value in dict.fromkeys(values)}
    return "; ".join(f"{value} (rank {ranges(ranks)})" for value, ranks in owners.items())


def _options(options: dict[str, Any]) -> str:
    """Return the given options as text. An option that is None was not given."""
    given = {key: value for key, value in options.items() if value is not None}
    return ", ".join(f"{key}={_option(value)}" for key, value in given.items()) or "defaults"


def _option(value: Any) -> str:
    if isinstance(value, dict):
        return _options(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _changed(cell: Cell) -> list[str]:
    """Return a note on each change that was made so that the script runs here."""
    sentences = dict.fromkeys(one_line(text) for setup in _setups(cell) for text in setup.changed)
    return [f"Changed for this run: {text.rstrip('.')}." for text in sentences]


def _swapped(cell: Cell) -> list[str]:
    """Return a note on the step from which on a mode replaced the script's synchronisation (--instead), and on what."""
    swap = next((r for r in cell.first.ranks[0].records if isinstance(r, Swap)), None)
    if swap is None:
        return []
    replaced = swap.detail.get("replaced")
    what = f" in place of {', '.join(map(str, replaced))}" if isinstance(replaced, list) and replaced else ""
    return [one_line(f"From step {swap.step + 1} on {swap.mode} synchronised the script's gradients{what}.")]


def _sampled(cell: Cell) -> list[str]:
    """Return a note on the steps in which gradients were sampled, and on their time."""
    summary = cell.first.summary
    if not summary.sampled_steps or summary.sampled_seconds is None:
        return []
    which = ", ".join(str(step + 1) for step in sorted(cell.first.sampled))
    return [
        f"In {summary.sampled_steps} of {summary.sampled_steps + summary.steps} steps (step {which}) gradients and"
        f" parameters were sampled. Such a step took {seconds(summary.sampled_seconds)} and is in no other time here."
    ]


def _written(cell: Cell) -> list[str]:
    """Return notes on the files that the script wrote and where they were collected. Equal notes are merged."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in cell.first.ranks:
        for record in (r for r in rank.records if isinstance(r, Files) and (r.count or r.left_out)):
            names = ", ".join(map(one_line, record.names)) + (", ..." if record.count > len(record.names) else "")
            files = f"{record.count} file{'s' * (record.count != 1)} ({size_in_words(record.bytes)}): {names}"
            reasons = "; ".join(map(one_line, record.reasons))
            left_out = f" {record.left_out} more were not collected: {reasons}." if record.left_out else ""
            found.setdefault((files if record.count else "", left_out), []).append(rank.number)
    return [
        f"Rank {ranges(ranks)} wrote "
        + (f"{files}; collected in {_folders(cell, ranks)}.{left_out}" if files else f"files.{left_out}")
        for (files, left_out), ranks in found.items()
    ]


def _folders(cell: Cell, ranks: Sequence[int]) -> str:
    first, last = (cell.first.folder.files(rank).name for rank in (ranks[0], ranks[-1]))
    return first if first == last else f"{first} to {last}"


def _unseen(cell: Cell) -> list[str]:
    """Return notes on parts of the observer that failed, with the ranks."""
    found: dict[str, list[int]] = {}
    for rank in cell.first.ranks:
        for record in (r for r in rank.records if isinstance(r, Unseen)):
            found.setdefault(one_line(f"{record.seam} ({record.error})"), []).append(rank.number)
    return [f"Not seen on rank {ranges(ranks)}: {what}." for what, ranks in found.items()]
