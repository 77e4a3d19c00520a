"""The records of a user's script are checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.results.observations import Calls, Gradients
from testbed.results.records import read
from testbed.spec.errors import SpecError

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
