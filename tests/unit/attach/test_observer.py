"""The observer in a script without ranks: it is there after `import torch`, and failing to start it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.attach import channel
from testbed.attach.events import FAULT
from testbed.attach.intake import Intake, Records
from testbed.results.observations import Setup, Unseen
from testbed.results.records import Step, read
from tests.support.observed import python_path

SCRIPT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("done", "sitecustomize" in dir(), __import__("os").environ.get("CHAINED"))
"""


def run(folder: Path, *, variables: dict[str, str] | None = None, more_path: str = "", flags: str = "") -> str:
    """Run the script with an observer; return its output."""
    path = folder / "observer"
    records = Records(folder / "rank0.jsonl")
    intake = Intake(path, records, os.geteuid())
    own = {channel.VARIABLE: str(path), channel.REQUEST: json.dumps({"schema": 3}), "PATH": os.environ["PATH"]}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(python_path(folder)), more_path]))
    command = [sys.executable, *flags.split(), "-c", SCRIPT]
    done = subprocess.run(command, env=own | (variables or {}), capture_output=True, text=True, timeout=120)
    intake.finish(30)
    records.close()
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_script_without_a_process_group_has_steps(tmp_path: Path) -> None:
    assert run(tmp_path).startswith("done")
    records = list(read(tmp_path / "rank0.jsonl"))
    setup = next(each for each in records if isinstance(each, Setup))
    assert (setup.world, setup.backend) == (1, "")
    assert [each.step for each in records if isinstance(each, Step)] == [0, 1, 2]


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os\nos.environ['CHAINED'] = 'yes'\n")
    assert run(tmp_path, more_path=str(other)).strip().endswith("yes")
    assert any(isinstance(each, Step) for each in read(tmp_path / "rank0.jsonl"))


def test_a_sitecustomize_that_raises_does_not_end_the_observer(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    assert "ValueError: mine" in run(tmp_path, more_path=str(other))
    assert any(isinstance(each, Step) for each in read(tmp_path / "rank0.jsonl"))


@pytest.mark.parametrize("wrong", ["{", "[]", '{"deadline": "soon"}'])
def test_a_request_that_cannot_be_read_does_not_reach_the_script(tmp_path: Path, wrong: str) -> None:
    output = run(tmp_path, variables={channel.REQUEST: wrong})
    assert "done" in output and "testbed: the script is not observed (" in output


def test_a_seam_that_cannot_be_installed_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, variables={FAULT: "install data"}).startswith("done")
    records = list(read(tmp_path / "rank0.jsonl"))
    assert [each.seam for each in records if isinstance(each, Unseen)] == ["install data"]
    assert sum(isinstance(each, Step) for each in records) == 3
