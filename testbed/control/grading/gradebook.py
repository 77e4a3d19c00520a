"""The results of `testbed grade`: results.json, results.md and results.html. They are rewritten after a submission."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from testbed.control.grading.demands import NOT_PROVEN, Verdict
from testbed.results.folder import write_whole
from testbed.spec.errors import one_line

HEADER = ("part", "demand", "points", "verdict", "evidence", "reason")
LEGEND = (
    "Evidence: the controller measured 'outside' (exit codes, time, the byte counters of interfaces); 'records'"
    " come from the observer inside the script's own process, so a script can forge them. If records contradict the"
    " evidence from outside, a demand is 'not proven': it gives no points, and a person has to look at it."
)


@dataclass(frozen=True, kw_only=True)
class Graded:
    """One submission: its verdicts, or why it could not be graded."""

    name: str
    verdicts: Sequence[Verdict] = ()
    problem: str = ""  # an error of this machine, not of the submission
    seconds: float = 0.0

    @property
    def points(self) -> float:
        return sum(verdict.points for verdict in self.verdicts)

    @property
    def of(self) -> float:
        return sum(verdict.of for verdict in self.verdicts)

    @property
    def unproven(self) -> int:
        return sum(verdict.verdict == NOT_PROVEN for verdict in self.verdicts)

    def headline(self) -> str:
        if self.problem:
            return f"{self.name}: not graded: {self.problem}"
        look = f"; {self.unproven} not proven, look at them" if self.unproven else ""
        return f"{self.name}: {self.points:g} of {self.of:g} points{look}"

    def rows(self) -> list[list[str]]:
        """Return the rows of its table. Text from a submission is on one line and without control characters."""
        return [
            [
                each.part,
                f"{each.kind}: {each.demand}",
                f"{each.points:g} of {each.of:g}",
                each.verdict,
                each.evidence,
                one_line(each.reason),
            ]
            for each in self.verdicts
        ]


@dataclass
class Gradebook:
    """The results of all submissions of one call."""

    title: str
    folder: Path
    substrate: str
    total: int  # submissions that were found
    graded: list[Graded] = field(default_factory=list)

    def add(self, graded: Graded) -> None:
        """Add a submission and write all files."""
        self.graded.append(graded)
        self.write()

    @property
    def complete(self) -> bool:
        """True if every submission was graded."""
        return len(self.graded) == self.total and not any(each.problem for each in self.graded)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "results.json", json.dumps(self.document(), indent=1))
        write_whole(self.folder / "results.md", self.markdown())
        write_whole(self.folder / "results.html", self.page())

    def document(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "substrate": self.substrate,
            "complete": self.complete,
            "submissions": [
                {
                    "name": each.name,
                    "points": each.points,
                    "of": each.of,
                    "not_proven": each.unproven,
                    "problem": each.problem,
                    "seconds": round(each.seconds, 1),
                    "verdicts": [asdict(verdict) for verdict in each.verdicts],
                }
                for each in self.graded
            ],
        }

    def missing(self) -> str:
        left = self.total - len(self.graded)
        return f"{left} of {self.total} submissions were not graded." if left else ""

    def markdown(self) -> str:
        lines = [f"# {_cell(self.title)}", "", self.missing(), ""]
        lines += _markdown_table(("submission", "points", "not proven"), map(_summary, self.graded))
        for each in self.graded:
            lines += ["", f"## {_cell(each.headline())}", "", *_markdown_table(HEADER, each.rows())]
        return "\n".join([*lines, "", LEGEND, ""])

    def page(self) -> str:
        parts = [f"<h1>{html.escape(self.title)}</h1>", f"<p>{html.escape(self.missing())}</p>"]
        parts.append(_html_table(("submission", "points", "not proven"), map(_summary, self.graded)))
        for each in self.graded:
            parts += [f"<h2>{html.escape(one_line(each.headline()))}</h2>", _html_table(HEADER, each.rows())]
        parts.append(f"<p>{html.escape(LEGEND)}</p>")
        return PAGE.format(title=html.escape(self.title), body="\n".join(parts))


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8885; }}
tr[data-verdict="not met"] td:nth-child(4) {{ color: #c22; font-weight: 600; }}
tr[data-verdict="not proven"] td:nth-child(4) {{ color: #b60; font-weight: 600; }}
</style>
{body}
</html>
"""


def _summary(graded: Graded) -> list[str]:
    points = "not graded" if graded.problem else f"{graded.points:g} of {graded.of:g}"
    return [one_line(graded.name), points, str(graded.unproven)]


def _cell(text: str) -> str:
    """Return a text escaped for a cell of a Markdown table, so that it contains no markup, link or image."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    return re.sub(r"[\\|*\[\]]", r"\\\g<0>", escaped)


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        verdict = f' data-verdict="{html.escape(cells[3])}"' if tag == "td" and len(cells) == len(HEADER) else ""
        return f"<tr{verdict}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(each, "td") for each in rows) + "</table>"
