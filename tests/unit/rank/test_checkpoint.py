"""Checkpoints: what goes in comes out, the last two are kept, and what is torn, foreign or false is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from testbed.rank.checkpoint import Checkpoints
from testbed.rank.group import Group, single_rank_group
from testbed.rank.optim import Optimizer
from testbed.rank.sync.synchronizer import NoSync
from testbed.rank.train import Tally
from testbed.results.timeline import Timeline
from testbed.spec.errors import SpecError
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec, RunSpec


class Trained:
    def __init__(self, seed: int, name: Any = "sgd") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.optimizer = Optimizer(OptimizerSpec(name=name), self.model, 8, 100)
        self.sync = NoSync(SyncMode.parse("single"), single_rank_group(), Timeline())
        self.sync.attach(self.model, self.optimizer)
        self.seen = Tally()

    def step(self) -> float:
        self.sync.zero()
        loss = self.model(torch.rand(8, 4)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.seen.add(loss.item(), torch.zeros(1, 2), torch.zeros(1))
        return loss.item()


def checkpoints_in(folder: Path, every: int = 1) -> Checkpoints:
    return Checkpoints(
        RunSpec.load({"mode": "single", "checkpoint": every}, "test"), folder, single_rank_group(), resume=True
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_a_restored_run_continues_like_an_undisturbed_one(tmp_path: Path, name: str) -> None:
    trained, keeps = Trained(1, name), checkpoints_in(tmp_path / "c")
    for _ in range(3):
        trained.step()
    keeps.write(trained, 3)
    drawn = (random.random(), np.random.rand())
    expected = [trained.step() for _ in range(3)]
    other = Trained(2, name)
    other.step()
    assert keeps.agree(trained) == 3
    keeps.load(other, 3)
    assert (random.random(), np.random.rand()) == drawn
    assert [other.step() for _ in range(3)] == expected
    assert other.seen.loss == trained.seen.loss and other.seen.labels == trained.seen.labels
    left, right = other.model.state_dict(), trained.model.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in right)


def test_a_checkpoint_is_written_every_k_steps_and_the_last_two_are_kept(tmp_path: Path) -> None:
    trained, keeps = Trained(1), checkpoints_in(tmp_path / "c", every=5)
    for step in range(1, 31):
        keeps.write_if_due(trained, step, last=step == 30)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == [f"rank0-step{step}.{end}" for step in (20, 25) for end in ("json", "safetensors")]


@pytest.mark.parametrize(("mode", "every", "kept"), [("ring", 2, 2), ("ring/every:8", 2, 6), ("ring/every:3", 5, 3)])
def test_with_every_k_more_checkpoints_are_kept(tmp_path: Path, mode: str, every: int, kept: int) -> None:
    spec = RunSpec.load({"mode": mode, "nodes": 2, "batch": 4, "checkpoint": every}, "test")
    trained, keeps = Trained(1), Checkpoints(spec, tmp_path / "c", single_rank_group())
    for step in range(1, 41):
        keeps.write_if_due(trained, step, last=False)
    written = range(every, 41, every)
    names = {f"rank0-step{step}.{end}" for step in written[-kept:] for end in ("json", "safetensors")}
    assert {path.name for path in (tmp_path / "c").iterdir()} == names


def test_new_checkpoints_are_kept_if_an_older_run_has_left_later_ones(tmp_path: Path) -> None:
    trained, keeps = Trained(1), checkpoints_in(tmp_path)
    for step in (20, 30, 10):
        keeps.write(trained, step)
    assert (tmp_path / "rank0-step10.json").exists()


class TwoRanks(Group):
    """Rank 0 of two, the other of which has these checkpoints."""

    def __init__(self, other: dict[int, str]) -> None:
        super().__init__(0, 1, single_rank_group().store, 1.0)
        self.other = json.dumps(other)

    def all_gather_text(self, key: str, value: str) -> list[str]:
        return [value, self.other]


def test_checkpoints_without_a_common_step_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trained, keeps = Trained(1), checkpoints_in(tmp_path)
    keeps.write(trained, 20)
    keeps.write(trained, 30)
    for other, has in (({10: "x"}, "10"), ({}, "none"), ({20: "another", 30: "hash"}, "20, 30")):
        keeps.group = TwoRanks(other)
        keeps.must_agree = True
        assert keeps.agree(trained) == 0
        said = caplog.text
        caplog.clear()
        assert "no checkpoint is common to all ranks" in said and f"rank 0: 20, 30; rank 1: {has})" in said
    assert checkpoints_in(tmp_path / "none").agree(trained) == 0
    assert caplog.text == ""  # there are none, so there is nothing to say


@pytest.mark.parametrize("damage", ["tensors missing", "tensors cut", "facts missing", "facts cut", "of another rank"])
def test_a_damaged_checkpoint_is_ignored_and_the_previous_one_is_used(tmp_path: Path, damage: str) -> None:
    trained, keeps = Trained(1), checkpoints_in(tmp_path)
    keeps.write(trained, 1)
    keeps.write(trained, 2)
    what = tmp_path / ("rank0-step2.safetensors" if "tensors" in damage else "rank0-step2.json")
    if "missing" in damage:
        what.unlink()
    elif "cut" in damage:
        what.write_bytes(what.read_bytes()[:-40])
    else:
        what.write_text(json.dumps(json.loads(what.read_text()) | {"rank": 1}))
    assert keeps.agree(trained) == 1


def test_without_any_checkpoint_a_run_starts_at_the_beginning(tmp_path: Path) -> None:
    assert checkpoints_in(tmp_path / "none").agree(Trained(1)) == 0


def forge(folder: Path, tensors: bytes) -> None:
    """Other tensors with a correct checksum."""
    (folder / "rank0-step1.safetensors").write_bytes(tensors)
    facts = folder / "rank0-step1.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"sha256": hashlib.sha256(tensors).hexdigest()}))


def test_a_forged_checkpoint_is_refused_with_a_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save

    trained, keeps = Trained(1), checkpoints_in(tmp_path)
    keeps.write(trained, 1)
    before = [p.clone() for p in trained.model.parameters()]
    for tensors in (save({"model.0.weight": torch.zeros(9, 9)}), save({"x": torch.zeros(1)}), b"\x80\x04pickle", b""):
        forge(tmp_path, tensors)
        with pytest.raises(SpecError, match=r"rank0-step1\.safetensors: does not fit this run \(.+\)\. Remove it"):
            keeps.load(trained, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, trained.model.parameters(), strict=True))


def test_a_link_out_of_the_folder_and_a_huge_file_are_not_read(tmp_path: Path) -> None:
    trained, keeps = Trained(1), checkpoints_in(tmp_path / "c")
    keeps.write(trained, 1)
    tensors = tmp_path / "c" / "rank0-step1.safetensors"
    (tmp_path / "elsewhere").write_bytes(tensors.read_bytes())
    tensors.unlink()
    tensors.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpecError, match="is a symlink"):
        keeps.load(trained, 1)
    tensors.unlink()
    with tensors.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(SpecError, match="at most"):
        keeps.load(trained, 1)


def test_links_and_huge_files_are_no_valid_checkpoints(tmp_path: Path) -> None:
    """A sparse file of terabytes would keep a rank hashing for longer than any deadline."""
    trained, keeps = Trained(1), checkpoints_in(tmp_path / "c")
    keeps.write(trained, 1)
    keeps.write(trained, 2)
    tensors = tmp_path / "c" / "rank0-step2.safetensors"
    good = tensors.read_bytes()
    with tensors.open("r+b") as file:
        file.truncate(1 << 40)
    begun = time.monotonic()
    assert keeps.agree(trained) == 1
    assert time.monotonic() - begun < 30
    tensors.unlink()
    (tmp_path / "elsewhere").write_bytes(good)
    tensors.symlink_to(tmp_path / "elsewhere")
    assert keeps.agree(trained) == 1
    tensors.unlink()
    tensors.write_bytes(good)
    assert keeps.agree(trained) == 2
    spec = RunSpec.load({"mode": "single", "checkpoint": 1}, "test")
    limited = Checkpoints(spec, keeps.folder, keeps.group, resume=True, extra_bytes=0, max_ratio=1)
    assert limited.agree(trained) == 0
