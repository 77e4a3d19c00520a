"""Emulated compute with real communication: every kind of mode keeps replicas equal and takes the recorded time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.results.folder import RunFolder
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.records import Step, read
from tests.support.command import run_command
from tests.support.rank_pool import RankPool
from tests.support.training import lenet, train

Ranks = Callable[[int], RankPool]
pytestmark = pytest.mark.gloo
LAYERS = (
    ProfiledLayer(name="0", sizes=(30_000, 400), shapes=((75, 100), (100,)), forward_s=0.01, backward_s=0.02),
    ProfiledLayer(name="1", forward_s=0.005, backward_s=0.005),
    ProfiledLayer(name="2", sizes=(160_000, 1600), shapes=((400, 100), (400,)), forward_s=0.01, backward_s=0.02),
)
TIMES = {"data_s": 0.002, "zero_s": 0.001, "loss_s": 0.004, "optimizer_s": 0.008}
PROFILE = Profile(model="lenet5", batch_per_rank=6, layers=LAYERS, **TIMES)
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch-per-rank", "6", "--on", "process", "--set", "probe=false"]
MODES = ["ddp/bucket:1MiB", "ring/bucket:64KiB/overlap", "ring/bucket:64KiB/pipeline", "tree", "server", "ring/every:2"]
MODES += ["direct/int8", "ddp/powersgd:2", "direct/bucket:64KiB/overlap/topk:0.1"]


@pytest.mark.parametrize("mode", MODES)
def test_modes_and_codecs_run_unchanged(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    PROFILE.write(tmp_path / "p.json")
    keys = {"compute": f"emulated:{tmp_path / 'p.json'}", "mode": mode, "steps": 6, "dtype": "float32"}
    spec = lenet(**keys, evaluate="never", optimizer={"lr": 0.02}).with_files()
    folder = RunFolder(tmp_path / "run")
    folder.create(spec)
    run = train(ranks(4), spec, folder.path)
    assert run.summary.replicas_agree and run.summary.losses == [] and run.summary.test_accuracy is None
    assert run.summary.gradient_bytes == 192_000
    compute = PROFILE.step_s - PROFILE.optimizer_s  # the pipeline's optimizer runs beside it
    for rank in range(4):
        steps = [each for each in read(folder.records(rank)) if isinstance(each, Step)]
        # One step may be shorter, because what the step before took too long is deducted.
        assert 0.95 * compute <= sum(step.total for step in steps) / len(steps) < 12 * PROFILE.step_s


def test_replicas_differ_if_nothing_is_averaged(ranks: Ranks, tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    keys = {"compute": f"emulated:{tmp_path / 'p.json'}", "mode": "none", "steps": 3, "dtype": "float32"}
    spec = lenet(**keys, evaluate="never").with_files()
    folder = RunFolder(tmp_path / "run")
    folder.create(spec)
    assert train(ranks(4), spec, folder.path).summary.replicas_agree is False


def test_a_profile_is_recorded_and_replayed(tmp_path: Path) -> None:
    done = run_command("profile", *SMALL, "--steps", "6", "--out", "p.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = Profile.read(tmp_path / "p.json")
    assert document["file"] == "p.json" and document["profile"]["schema"] == 1
    assert found.gradient_bytes == 4 * 61_706 and len(found.layers) == 12 and found.batch_per_rank == 6
    found.model_copy(update=TIMES | {"layers": LAYERS}).write(tmp_path / "p.json")  # steps that two cores can replay
    run = ["--mode", "ring", "--nodes", "2", "--steps", "6", *SMALL]
    made = run_command("run", *run, "--set", "compute=emulated:p.json", "--out", "r", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "lenet5 (emulated compute)" in made.stdout and "loss 2." not in made.stdout
    copies = list((tmp_path / "r" / "files").iterdir())
    assert [Profile.read(path).step_s for path in copies] == [PROFILE.step_s]
    wrong = run_command("run", *run, "--batch-per-rank", "7", "--set", "compute=emulated:p.json", cwd=tmp_path)
    assert wrong.returncode == 2 and "was recorded with 6" in wrong.stderr
