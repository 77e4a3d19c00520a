"""`--instead MODE` on scripts that synchronise in many ways: the losses of the plain mean, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.results.observations import Swap
from testbed.results.records import Step
from testbed.spec.errors import UsageError
from tests.support.observed import Rank, instead, python_path, run_ranks

pytestmark = pytest.mark.gloo
HAND = "hand_written.py"
MODE = "ring/bucket:16KiB/overlap"


def printed(rank: Rank) -> list[float]:
    return [float(line.split()[-1]) for line in rank.output.splitlines() if "mean loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the script by itself: the same in every style, because each gives the mean."""
    ranks = run_ranks(tmp_path_factory.mktemp("plain"), HAND, attached=False, variables={"STYLE": "one_by_one"})
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    return printed(ranks[0])


@pytest.mark.parametrize(
    ("style", "replaced"),
    [
        ("by_future", ["all_reduce"]),
        ("flat_half", ["all_reduce"]),
        ("reduced", ["broadcast", "reduce"]),
        ("gathered_whole", ["all_gather_into_tensor"]),
        ("sharded", ["all_gather_into_tensor", "reduce_scatter_tensor"]),
        ("sharded_lists", ["all_gather", "reduce_scatter"]),
        ("hook_async", ["all_reduce"]),
    ],
)
def test_a_hand_written_mean_is_replaced(tmp_path: Path, plain: list[float], style: str, replaced: list[str]) -> None:
    ranks = run_ranks(tmp_path, HAND, variables={"STYLE": style}, request=instead(MODE))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    assert printed(ranks[0]) == pytest.approx(plain, rel=1e-3) and len(plain) == 20
    (swap,) = ranks[0].of(Swap)
    assert [each.partition(" ")[0] for each in swap.detail["replaced"]] == replaced


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("ring", "the script's gradients go through send at hand_written.py:"),
        ("hook_copy", "runs during backward, and not as all_reduce of all ranks on an accumulated gradient"),
        ("tensor_hook", "runs during backward, and not as all_reduce of all ranks on an accumulated gradient"),
    ],
)
def test_what_has_no_closed_form_is_refused(tmp_path: Path, style: str, said: str) -> None:
    ranks = run_ranks(tmp_path, HAND, variables={"STYLE": style}, request=instead(MODE))
    assert [rank.code for rank in ranks] == [UsageError.exit_code] * 2
    assert all(f"testbed: --instead {MODE}: " in rank.output and said in rank.output for rank in ranks)
    assert len(ranks[0].of(Step)) == 4  # before the mode


def test_two_optimizers_that_follow_each_other_are_one_update(tmp_path: Path, plain: list[float]) -> None:
    """Both have the settings of the single one, so the losses are the same."""
    ranks = run_ranks(tmp_path, HAND, variables={"STYLE": "flat", "OPTIMIZERS": "2"}, request=instead(MODE))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    assert printed(ranks[0]) == pytest.approx(plain, rel=1e-3)


def losses(ranks: list[Rank]) -> list[float]:
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    return [step.loss for step in ranks[1].of(Step)]


def test_options_of_ddp_make_no_difference(tmp_path: Path) -> None:
    """Accumulation, clipping, views of buckets, a search for unused parameters, and a hook that rounds."""
    options = {"PASSES": "2", "CLIP": "1", "HOOK": "1", "DDP": "find_unused_parameters gradient_as_bucket_view"}
    expected = losses(run_ranks(tmp_path, "ddp_buffers.py", variables=options))
    found = losses(run_ranks(tmp_path, "ddp_buffers.py", variables=options, request=instead(MODE)))
    assert found == pytest.approx(expected, rel=1e-3) and len(expected) == 12


def test_gradients_of_a_scaled_loss_are_compared_before_they_are_unscaled(tmp_path: Path) -> None:
    scaled = {"STYLE": "scaler", "SCRIPT_STEPS": "10"}
    expected = losses(run_ranks(tmp_path, "ddp_styles.py", variables=scaled))
    found = losses(run_ranks(tmp_path, "ddp_styles.py", variables=scaled, request=instead(MODE)))
    assert found == pytest.approx(expected, rel=1e-3) and len(expected) == 10


@pytest.mark.parametrize(
    ("script", "variables", "mode", "said"),
    [
        ("ddp_buffers.py", {"DDP": "static_graph"}, MODE, "DDP has static_graph=True"),
        ("ddp_styles.py", {"STYLE": "closure"}, MODE, "computes gradients inside optimizer.step (a closure)"),
        ("two_optimizers.py", {"SCRIPT_STEPS": "8"}, MODE, "several optimizers with a backward pass between"),
        (HAND, {"STYLE": "flat"}, "ring/bucket:16KiB/pipeline", "reads them. Use overlap instead of pipeline."),
    ],
)
def test_what_a_mode_cannot_follow_is_refused(
    tmp_path: Path, script: str, variables: dict[str, str], mode: str, said: str
) -> None:
    ranks = run_ranks(tmp_path, script, variables=variables, request=instead(mode))
    assert [rank.code for rank in ranks] == [UsageError.exit_code] * 2
    assert said in ranks[0].output


def test_a_python_without_our_packages_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "lacks").mkdir()
    (tmp_path / "lacks" / "pydantic.py").write_text("raise ModuleNotFoundError('No module', name='pydantic')")
    path = {"PYTHONPATH": f"{python_path(tmp_path)}:{tmp_path / 'lacks'}"}
    ranks = run_ranks(tmp_path, HAND, variables=path | {"STYLE": "flat"}, request=instead(MODE), started=True)
    assert [rank.code for rank in ranks] == [UsageError.exit_code] * 2
    assert "lacks a package of the testbed (pydantic)" in ranks[0].output and not ranks[0].of(Step)
