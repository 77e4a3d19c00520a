"""`testbed exec --instead MODE`: same losses as the script alone, or a refusal that says what was seen."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from testbed.results.observations import Swap
from testbed.results.records import Record, Step, read
from testbed.spec.errors import Interrupted
from tests.support.command import OWN_METHOD, run_command, start_command, write_method
from tests.support.observed import instead, run_ranks

pytestmark = pytest.mark.gloo
SCRIPTS = Path(__file__).parents[1] / "scripts"
GATHER = "gather_mean.py"


def run_script(
    folder: Path, name: str, *flags: str, nodes: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`/r, with these variables in its environment."""
    shutil.copy(SCRIPTS / name, folder / name)
    shutil.rmtree(folder / "r", ignore_errors=True)
    common = ["--nodes", str(nodes), "--on", "process", "--set", "probe=false", "--out", "r", "--json"]
    given = [f"{key}={value}" for key, value in variables.items()]
    return run_command("exec", *common, *flags, "--", "env", *given, "python", name, cwd=folder)


def records(folder: Path, rank: int = 0) -> list[Record]:
    return list(read(folder / "r" / f"rank{rank}.jsonl"))


def losses(folder: Path, rank: int = 0) -> list[float]:
    return [each.loss for each in records(folder, rank) if isinstance(each, Step)]


def printed(folder: Path, rank: int = 0) -> list[float]:
    """The mean losses that the script itself printed: sums over the ranks by a collective of its own."""
    lines = (folder / "r" / f"rank{rank}.log").read_text().splitlines()
    return [float(line.split()[-1]) for line in lines if "mean loss" in line]


def forked(
    folder: Path, name: str, mode: str | None = None, *, ranks: int = 2, rank: int = 0, **variables: str
) -> tuple[list[float], Swap | None]:
    """Run a script in forked ranks, with a mode instead of its own: the losses of a rank, and the swap."""
    found = run_ranks(folder, name, ranks=ranks, variables=variables, request=instead(mode, ranks) if mode else None)
    assert [each.code for each in found] == [0] * ranks, found[0].output
    own = [float(line.split()[-1]) for line in found[rank].output.splitlines() if "mean loss" in line]
    swaps: list[Swap] = found[0].of(Swap)
    return own or [step.loss for step in found[rank].of(Step)], swaps[0] if swaps else None


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the gather/scatter script by itself."""
    return forked(tmp_path_factory.mktemp("alone"), GATHER, ranks=3)[0]


@pytest.fixture(scope="module")
def alone_with_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of rank 1 of the script with DDP by itself."""
    return forked(tmp_path_factory.mktemp("alone"), "ddp_buffers.py", rank=1)[0]


def test_exec_runs_a_script_with_a_mode_instead_of_its_own(tmp_path: Path, alone: list[float]) -> None:
    done = run_script(tmp_path, GATHER, "--instead", "ring/bucket:16KiB/overlap", nodes=3)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["status"] == "ok"
    assert printed(tmp_path) == pytest.approx(alone, rel=1e-3)
    (found,) = [each for each in records(tmp_path) if isinstance(each, Swap)]
    assert found.step == 4 and found.mode == "ring/bucket:16KiB/overlap"


@pytest.mark.parametrize("mode", ["ring/bucket:16KiB", "ring/bucket:16KiB/overlap", "allreduce/param", "ddp"])
def test_gather_and_scatter_by_another_mode_has_the_same_losses(tmp_path: Path, alone: list[float], mode: str) -> None:
    found, swap = forked(tmp_path, GATHER, mode, ranks=3)
    assert found == pytest.approx(alone, rel=1e-3) and len(alone) == 20
    assert swap is not None and swap.step == 4 and swap.detail["factor"] == pytest.approx(1, abs=1e-3)
    assert swap.detail["replaced"] == [f"gather at {GATHER}:29", f"scatter at {GATHER}:31"]


@pytest.mark.parametrize("mode", ["ring/bucket:16KiB/overlap", "ring/bucket:16KiB/pipeline", "ddp/bucket:32KiB"])
def test_ddp_by_another_mode_has_the_same_losses(tmp_path: Path, alone_with_ddp: list[float], mode: str) -> None:
    found, swap = forked(tmp_path, "ddp_buffers.py", mode, rank=1)
    assert found == pytest.approx(alone_with_ddp, rel=1e-3) and len(alone_with_ddp) == 12
    assert swap is not None and swap.detail["ddp"] is True


def test_all_reduce_of_a_flat_copy_is_replaced_and_metrics_are_not(tmp_path: Path) -> None:
    expected, _ = forked(tmp_path, "flat_all_reduce.py")
    found, swap = forked(tmp_path, "flat_all_reduce.py", "ring/bucket:16KiB/overlap")
    assert found == pytest.approx(expected, rel=1e-3) and expected
    assert swap is not None and len(swap.detail["replaced"]) == 1


@pytest.mark.parametrize(
    ("name", "mode", "variables", "said"),
    [
        (GATHER, "ring", {"GRADIENTS": "sum"}, "2 times the mean of all ranks, the sum is not divided by 2"),
        (GATHER, "ring", {"GRADIENTS": "none"}, "not synchronised: each rank updates with its own"),
        ("ddp_buffers.py", "ring/bucket:16KiB/pipeline", {"CLIP": "1"}, "reads them. Use overlap instead of pipeline."),
    ],
)
def test_what_is_not_the_plain_mean_is_refused(
    tmp_path: Path, name: str, mode: str, variables: dict[str, str], said: str
) -> None:
    done = run_script(tmp_path, name, "--instead", mode, **variables)
    assert done.returncode == 2
    assert f"--instead {mode}: " in done.stderr and said in done.stderr
    assert len(losses(tmp_path)) in range(1, 5)  # what was recorded so far is kept


def test_clipping_after_synchronisation_is_the_scripts_own(tmp_path: Path) -> None:
    expected, _ = forked(tmp_path, GATHER, CLIP="1")
    found, _ = forked(tmp_path, GATHER, "ring/bucket:16KiB/overlap", CLIP="1")
    assert found == pytest.approx(expected, rel=1e-3) and expected


def test_accumulated_gradients_are_synchronised_once(tmp_path: Path) -> None:
    expected, _ = forked(tmp_path, "ddp_buffers.py", PASSES="3")
    found, swap = forked(tmp_path, "ddp_buffers.py", "ring/bucket:16KiB/overlap", PASSES="3")
    assert found == pytest.approx(expected, rel=1e-3) and expected
    assert swap is not None and swap.detail["passes"] == 3


def test_a_method_of_the_users_own_synchronises_a_script(tmp_path: Path, alone: list[float]) -> None:
    done = run_script(tmp_path, GATHER, "--instead", f"{write_method(tmp_path)}/bucket:16KiB", nodes=3)
    assert done.returncode == 0, done.stderr
    assert printed(tmp_path) == pytest.approx(alone, rel=1e-3)
    assert (tmp_path / "r" / "files" / "methods" / "my_way.py").read_text() == OWN_METHOD


def test_a_script_that_is_too_short_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, GATHER, "--instead", "ring", SCRIPT_STEPS="3")
    assert done.returncode == 2
    assert "--instead ring: the script made 3 steps" in done.stderr and len(losses(tmp_path)) == 3


def test_ctrl_c_keeps_what_a_search_for_a_script_has_measured(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / GATHER, tmp_path)
    flags = ["--nodes", "2", "--on", "process", "--share", "--set", "probe=false", "--steps", "8", "--json"]
    search = start_command("tune", *flags, "--", "python", GATHER, cwd=tmp_path)
    end = time.monotonic() + 300
    while not list(tmp_path.glob("runs/tune-*/002-*")) and search.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    search.send_signal(signal.SIGINT)
    text, _ = search.communicate(timeout=120)
    assert search.returncode == Interrupted.exit_code
    found = json.loads(text)
    assert found["winner"] == "ring" and [point["mode"] for point in found["curve"]] == ["ring"]
    assert "script" in found["untried"] and found["ended"] == "interrupted"
    assert found["command"].startswith("testbed exec --instead ring --nodes 2 --on process")
