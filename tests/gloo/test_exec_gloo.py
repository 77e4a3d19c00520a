"""`testbed exec` with real ranks: a plain DDP script becomes a run with a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.attach.as_cpu import CHANGED, GLOO
from testbed.results.observations import Calls, Setup
from testbed.results.records import Start, Step, read
from tests.support.command import run_command

pytestmark = pytest.mark.gloo
SCRIPTS = Path(__file__).parents[1] / "scripts"


def run_script(folder: Path, name: str, *flags: str, nodes: int = 2) -> dict[str, object]:
    shutil.copy(SCRIPTS / name, folder / name)
    common = ["--nodes", str(nodes), "--on", "process", "--set", "probe=false", "--out", "r", "--json"]
    done = run_command("exec", *common, *flags, "--", "python", name, cwd=folder)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    return dict(summary)


def test_a_ddp_script_is_observed(tmp_path: Path) -> None:
    summary = run_script(tmp_path, "ddp.py")
    assert summary["status"] == "ok" and len(summary["losses"]) == 12
    for rank in range(2):
        records = list(read(tmp_path / "r" / f"rank{rank}.jsonl"))
        start = next(each for each in records if isinstance(each, Start))
        setup = next(each for each in records if isinstance(each, Setup))
        steps = [each for each in records if isinstance(each, Step)]
        calls = [each for each in records if isinstance(each, Calls)][-1]
        assert start.rank == rank and start.gradient_bytes == 4 * (64 * 256 + 256 + 256 * 10 + 10)
        assert setup.backend == "gloo" and "DistributedDataParallel" in setup.wrappers
        assert len(steps) == 12 and all(step.busy > 0 and step.backward > 0 for step in steps[1:])
        reduced = [row for row in calls.rows if row.operation == "all_reduce" and row.phase == "backward"]
        assert sum(row.bytes for row in reduced) == 12 * start.gradient_bytes
        assert reduced[0].site == "ddp.py:27"


def test_a_script_ends_after_the_steps_that_were_requested(tmp_path: Path) -> None:
    summary = run_script(tmp_path, "ddp.py", "--steps", "5")
    assert summary["status"] == "ok" and len(summary["losses"]) == 5


def test_a_script_for_cuda_runs_with_as_cpu(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "common.py", tmp_path)
    summary = run_script(tmp_path, "for_cuda.py", "--as-cpu")
    assert summary["status"] == "ok" and len(summary["losses"]) == 4
    (setup,) = [each for each in read(tmp_path / "r" / "rank0.jsonl") if isinstance(each, Setup)]
    assert setup.changed == [CHANGED, GLOO]
