"""The records of a user's script are checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.results.conclude import Summary, conclude
from testbed.results.folder import RunFolder
from testbed.results.observations import Calls, Finding, Gradients
from testbed.results.records import read
from testbed.spec.errors import SpecError
from tests.support.scripted_runs import make_script_run

CALL = {"operation": "all_reduce", "site": "main.py:88", "phase": "sync", "count": 3, "bytes": 12}
GRADIENTS = {"kind": "gradients", "step": 1, "passes": 1, "names": ["a"], "local": [[1.0]], "given": [[0.5]]}


def test_observations_are_read_as_their_classes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    calls = {"kind": "calls", "first": 0, "last": 9, "rows": [CALL]}
    path.write_text("".join(json.dumps(each) + "\n" for each in (calls, GRADIENTS)))
    first, second = read(path)
    assert isinstance(first, Calls) and first.rows[0].site == "main.py:88"
    assert isinstance(second, Gradients) and second.given == [[0.5]]


@pytest.mark.parametrize("wrong", [{"step": -1}, {"local": "x"}, {"names": ["a" * 257]}])
def test_a_forged_observation_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps(GRADIENTS | wrong) + "\n")
    with pytest.raises(SpecError, match="line 1 is damaged"):
        list(read(path))


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
