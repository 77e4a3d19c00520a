"""A finding in summary.json: every key of it is written, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path

from testbed.results.conclude import Summary, conclude
from testbed.results.finding import Finding
from testbed.results.folder import RunFolder
from tests.support.scripted_runs import make_script_run

FOUND = Finding("summed", "error", "a title", "4.0", "divide", "certain", "a scaled loss", "main.py:9", 0.25)
KEYS = ("rule", "severity", "title", "evidence", "fix", "sure", "refuted_by", "site", "seconds")


def test_a_finding_is_in_the_summary_with_all_of_its_keys(tmp_path: Path) -> None:
    spec = make_script_run(tmp_path / "run").spec
    folder = RunFolder(tmp_path / "run")
    conclude(folder, spec, status="ok", substrate="netns", findings=[FOUND])
    (written,) = json.loads(folder.summary.read_text())["findings"]
    assert tuple(written) == KEYS and written["site"] == "main.py:9" and written["refuted_by"] == "a scaled loss"
    assert Summary.read(folder).findings == [FOUND]


def test_a_summary_of_an_earlier_version_has_no_findings(tmp_path: Path) -> None:
    make_script_run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    values = json.loads(folder.summary.read_text())
    del values["findings"]
    folder.summary.write_text(json.dumps(values))
    assert Summary.read(folder).findings == []
