"""Before training a mode averages known numbers: every built-in one passes, a wrong method of the user's is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.results.folder import RunFolder
from testbed.spec.mode import codecs_of, every_of, legal_modes
from tests.gloo.test_rank_process import PATIENCE, make
from tests.support.rank_pool import RankPool, RankRun
from tests.support.training import LENET, lenet, train

pytestmark = pytest.mark.gloo
Pools = Callable[[int], RankPool]

SMALL = [[7, 3], [1], [2], [13, 1, 3], [5, 4], [61], [30, 20]]  # all of it is sent
LARGE = [[64, 3, 3, 3], [64], [512, 512, 3, 3], [512], [10, 512], [10]]  # cut: the link has 1 Mbit


def known_modes() -> list[str]:
    """Every legal mode with every codec and every:K that can follow it, without a single node's."""
    found = []
    for mode in legal_modes(bucket="1KiB"):
        found += [str(mode), *(f"{mode}/{word}" for word in (*codecs_of(mode), *every_of(mode)))]
    return [mode for mode in found if mode != "single"]


def specs(modes: list[str], nodes: int, **values: Any) -> list[dict[str, Any]]:
    common = {"nodes": nodes, "batch_per_rank": 1, "steps": 3, "topology": {"racks": [[0], [*range(1, nodes)]]}}
    return [common | {"mode": mode} | values for mode in modes]


@pytest.mark.parametrize(
    ("shapes", "values"),
    [(SMALL, {}), (SMALL, {"dtype": "float64", "optimizer": {"clip": 1.0}}), (LARGE, {"link": {"rate": "1mbit"}})],
    ids=["small", "small in float64", "cut"],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_built_in_mode_is_accepted(
    ranks: Pools, size: int, shapes: list[list[int]], values: dict[str, Any]
) -> None:
    modes = known_modes()
    cases = specs(modes, size, **values)
    answers = ranks(size).run("check", specs=cases, shapes=shapes, timeout=600.0)
    for answer in answers:
        assert {mode: said for mode, said in zip(modes, answer["refusals"], strict=True) if said} == {}


def test_the_mistake_of_averaging_after_the_step_is_still_possible(ranks: Pools) -> None:
    (case,) = specs(["ring"], 3, placement="after-step")
    for answer in ranks(3).run("check", specs=[case], shapes=SMALL):
        assert answer["refusals"] == [""]


# --- a user's method -----------------------------------------------------------------------------------------------

SUM = "def mean_(buffer, group):\n    group.all_reduce(buffer)\n"
TWICE = f"{SUM}    buffer.div_(group.size ** 2)\n"
HALF = (
    "def mean_(buffer, group):\n    half = buffer[: (len(buffer) + 1) // 2]\n"
    "    group.all_reduce(half)\n    half.div_(group.size)\n"
)
NOT_AT_3 = f"{SUM}    buffer.div_(4 if group.size == 3 else group.size)\n"
LATER = "def mean_(buffer, group):\n    part = buffer[:10000]\n    group.all_reduce(part)\n    part.div_(group.size)\n"
ROUNDS = f"{SUM}    buffer.div_(group.size).mul_(8).round_().div_(8)\n"


def refusals(pool: RankPool, folder: Path, code: str, mode: str = "mine", **values: Any) -> list[str]:
    """What each rank says of a method with this code."""
    (folder / "mine.py").write_text(code)
    cases = specs([mode], pool.size, **values)
    return [a["refusals"][0] for a in pool.run("check", specs=cases, shapes=SMALL, methods=str(folder))]


@pytest.mark.parametrize("mode", ["mine", "mine/param", "mine/bucket:1KiB/overlap", "mine/fp16", "mine/every:3@2"])
def test_a_method_that_forgets_to_divide_is_refused_by_all_ranks_alike(ranks: Pools, tmp_path: Path, mode: str) -> None:
    said = refusals(ranks(4), tmp_path, SUM, mode)
    assert len(set(said)) == 1
    assert said[0].startswith(f"mode '{mode}': wrong on all ranks: requested the mean of 4 ranks of known numbers")
    assert "4 times the mean: the sum was not divided by N" in said[0]
    assert "expected 1." in said[0] and "found " in said[0] and "Fix mean_ in methods/mine.py" in said[0]


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (TWICE, "1/4 of the mean: it was divided by N twice"),
        (HALF, "this rank's own numbers: nothing was averaged there"),
        ("def mean_(buffer, group): ...\n", "this rank's own numbers: nothing was averaged there"),
        ("def mean_(buffer, group):\n    buffer.zero_()\n", "(zero)"),
        ("def mean_(buffer, group):\n    buffer.log_().log_()\n", "some are not finite"),
    ],
)
def test_a_wrong_method_is_refused_with_a_hint(ranks: Pools, tmp_path: Path, code: str, hint: str) -> None:
    said = refusals(ranks(4), tmp_path, code)
    assert len(set(said)) == 1 and hint in said[0]


def test_a_method_that_averages_a_part_is_refused_with_how_much_is_wrong(ranks: Pools, tmp_path: Path) -> None:
    total = sum(math.prod(shape) for shape in SMALL)
    assert f"of {total} numbers {total // 2} are wrong on rank 0" in refusals(ranks(2), tmp_path, HALF)[0]


@pytest.mark.parametrize(("size", "right"), [(2, True), (3, False), (4, True)])
def test_a_method_that_is_wrong_for_three_ranks_is_refused_there(
    ranks: Pools, tmp_path: Path, size: int, right: bool
) -> None:
    said = refusals(ranks(size), tmp_path, NOT_AT_3)
    assert all(not each for each in said) if right else all("the mean of 3 ranks" in each for each in said)


def test_a_method_that_rounds_on_purpose_says_by_how_much(ranks: Pools, tmp_path: Path) -> None:
    assert all(refusals(ranks(2), tmp_path, ROUNDS))
    assert not any(refusals(ranks(2), tmp_path, f"TOLERANCE = 0.05\n{ROUNDS}"))
    assert all("4 times" in said for said in refusals(ranks(4), tmp_path, f"TOLERANCE = 0.25\n{SUM}"))


def test_a_method_that_is_wrong_in_full_length_only_is_refused_after_its_first_exchange(
    ranks: Pools, tmp_path: Path
) -> None:
    """At 1 Mbit fewer than 10,000 numbers are sent before training."""
    (tmp_path / "mine.py").write_text(LATER)
    spec = LENET | {"mode": "mine", "nodes": 2, "link": {"rate": "1mbit"}}
    answers = ranks(2).run("train", spec=spec, run=str(tmp_path), methods=str(tmp_path))
    said = {answer["refused"] for answer in answers}
    assert len(said) == 1
    assert "gradients of the first exchange" in said.pop()


@pytest.mark.parametrize("mode", ["ring/bucket:64KiB/pipeline", "direct/int8", "direct/topk:0.01", "ring/powersgd:2"])
def test_trying_a_mode_again_and_again_leaves_no_trace(ranks: Pools, tmp_path: Path, mode: str) -> None:
    spec = lenet(mode=mode, steps=4)
    plain = train(ranks(4), spec, tmp_path / "plain")
    tried = train(ranks(4), spec, tmp_path / "tried", extra_checks=3)
    assert tried.hashes == plain.hashes
    for (mine,), (theirs,) in zip(tried.of_kind("end"), plain.of_kind("end"), strict=True):
        assert mine["payload"]["gradients"] == theirs["payload"]["gradients"]


# --- a method that fails -------------------------------------------------------------------------------------------

DEADLOCK = "def mean_(buffer, group):\n    group.wait(group.receive(buffer, (group.rank + 1) % group.size))\n"
LEAVES = (
    "import sys\ndef mean_(buffer, group):\n    if group.rank == 1:\n"
    "        sys.exit(0)\n    group.all_reduce(buffer)\n"
)
FAILS = "def mean_(buffer, group):\n    if group.rank == 2:\n        buffer.nosuch()\n    group.all_reduce(buffer)\n"


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, nodes: int = 3) -> tuple[RunFolder, RankRun]:
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    folder = make(tmp_path, nodes=nodes, mode="mine", deadline=4.0)
    return folder, RankRun(folder.path, nodes)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (DEADLOCK, r"deadlock in mean_ of methods/mine.py: all ranks run, but a rank waits for what no other sends"),
        (LEAVES, r"methods/mine.py, line 4: sys.exit(0) was called"),
        (FAILS, r"methods/mine.py, line 3: AttributeError: 'Tensor' object has no attribute 'nosuch'"),
        ("import nosuch\ndef mean_(buffer, group): ...\n", r"methods/mine.py, line 1: ModuleNotFoundError"),
    ],
    ids=["deadlock", "sys.exit", "an error on one rank", "an import"],
)
def test_a_method_that_fails_is_refused_by_all_ranks_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    _, run = start(tmp_path, monkeypatch, code)
    with run:
        assert run.wait(PATIENCE) == [2, 2, 2], [run.log_of(rank) for rank in range(3)]
    for rank in range(3):
        assert reason in run.log_of(rank)


LATE = (
    "calls = 0\ndef mean_(buffer, group):\n    global calls\n    calls += 1\n    if calls == 3{who}:\n        {what}\n"
)
LATE += "    group.all_reduce(buffer)\n    buffer.div_(group.size)\n"


def test_a_rank_that_leaves_in_training_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\n" + LATE.format(who=" and group.rank == 1", what="sys.exit(0)")
    folder, run = start(tmp_path, monkeypatch, code)
    with run:
        assert run.wait(PATIENCE) == [6, 1, 6], [run.log_of(rank) for rank in range(3)]
    assert f"sys.exit(0) was called in {folder.methods / 'mine.py'}, line 7, before the run was over" in run.log_of(1)


def test_a_deadlock_in_training_blames_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = LATE.format(who="", what="group.wait(group.receive(buffer, (group.rank + 1) % group.size))")
    _, run = start(tmp_path, monkeypatch, code)
    with run:
        assert run.wait(PATIENCE) == [6, 6, 6], [run.log_of(rank) for rank in range(3)]
    for rank in range(3):
        assert "deadlock in mean_ of methods/mine.py" in run.log_of(rank)
        assert "step 3" in run.log_of(rank)
