"""Results as files: numbers, tables, and text of submissions that is not markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

from testbed.control.grading.demands import MET, NOT_PROVEN, Verdict
from testbed.control.grading.gradebook import Gradebook, Graded

HOSTILE = "<script>alert(1)</script>|\x1b[31m`x`\nnext ![i](http://x/y.png) [l](javascript:alert(1)) \\| **b**"


def verdict(kind: str, points: float, result: str, reason: str = "why") -> Verdict:
    return Verdict(
        part="2a", kind=kind, demand="in words", points=points, of=3, verdict=result, reason=reason, evidence="records"
    )


def book(folder: Path, *graded: Graded, total: int | None = None) -> Gradebook:
    made = Gradebook("Assignment", folder, "compose", len(graded) if total is None else total)
    for each in graded:
        made.add(each)
    return made


GOOD = Graded(name="ann", verdicts=[verdict("runs", 3, MET), verdict("data", 0, NOT_PROVEN)])


def test_points_are_added_and_what_is_not_proven_is_counted(tmp_path: Path) -> None:
    made = book(tmp_path, GOOD)
    assert GOOD.headline() == "ann: 3 of 6 points; 1 not proven, look at them" and made.complete
    document = json.loads((tmp_path / "results.json").read_text())
    (only,) = document["submissions"]
    assert (only["points"], only["of"], only["not_proven"]) == (3, 6, 1) and document["complete"]
    assert only["verdicts"][1]["evidence"] == "records"
    text = (tmp_path / "results.md").read_text()
    assert "| ann | 3 of 6 | 1 |" in text and "| 2a | data: in words | 0 of 3 | not proven | records | why |" in text
    assert "<td>not proven</td>" in (tmp_path / "results.html").read_text()


def test_what_was_graded_is_in_the_files_before_the_rest_is(tmp_path: Path) -> None:
    made = book(tmp_path, GOOD, total=3)
    assert not made.complete and "2 of 3 submissions were not graded." in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["complete"] is False


def test_a_submission_that_could_not_be_graded_is_named(tmp_path: Path) -> None:
    made = book(tmp_path, Graded(name="bob", problem="the engine refused"))
    assert not made.complete and "bob: not graded: the engine refused" in (tmp_path / "results.md").read_text()


def test_text_of_a_submission_is_no_markup(tmp_path: Path) -> None:
    book(tmp_path, Graded(name=HOSTILE, verdicts=[verdict("runs", 0, NOT_PROVEN, HOSTILE)]))
    page, text = ((tmp_path / name).read_text() for name in ("results.html", "results.md"))
    assert "<script" not in page and "\x1b" not in page
    assert "<script" not in text and "\x1b" not in text and "`" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 2a ")]
    assert len(rows) == 1
    plain = re.sub(r"\\[\\|*\[\]]", "", rows[0])  # without what a backslash makes a plain character
    assert plain.count("|") == 7 and not set("*[]\\") & set(plain)
