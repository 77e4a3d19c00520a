"""A user's script on shaped namespaces: the kernel counts the bytes that theory derives from its collectives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.report.load import read_run
from testbed.report.model import Cell
from testbed.results.folder import RunFolder
from testbed.spec.errors import NetworkInvalid
from tests.support.command import run_command

pytestmark = [pytest.mark.net, pytest.mark.gloo]
SCRIPT = Path(__file__).parents[1] / "scripts" / "three_ways.py"
NODES = 4
GRADIENT_BYTES = 4 * (512 * 512 + 512 + 512 * 10 + 10)
# Headers are 0.2 to 4.6 % and acknowledgements of what was received as much again. A step's last bytes may be in the
# socket when the counter is read.
BOUNDS = (0.97, 1.095)


@pytest.mark.parametrize(
    ("way", "shares"),
    [  # multiples of the gradient that rank 0 and every other rank sends
        ("ddp", (1.5, 1.5)),
        ("all_reduce", (1.5, 1.5)),
        ("gather", (3.0, 1.0)),
    ],
)
def test_the_bytes_of_a_script_are_those_of_its_collectives(
    tmp_path: Path, way: str, shares: tuple[float, float]
) -> None:
    shutil.copy(SCRIPT, tmp_path / "main.py")
    shaped = ["--on", "netns", "--nodes", str(NODES), "--rate", "200mbit", "--keep-going", "--json", "--out", "r"]
    done = run_command("exec", *shaped, "--", "python", "main.py", way, cwd=tmp_path)
    assert done.returncode in (0, NetworkInvalid.exit_code), done.stderr  # a busy machine may fail the probe twice
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["counter"] == "interface eth0" and summary["images"] == [8.0] * NODES
    cell = Cell([read_run(RunFolder(tmp_path / "r"), whole=False)])
    needed = [value or 0.0 for value in cell.needed()]
    expected = [GRADIENT_BYTES * shares[rank > 0] for rank in range(NODES)]
    assert needed == pytest.approx(expected, rel=1e-6), "theory, from the observed collectives"
    ratios = [sent / least for sent, least in zip(summary["sent_per_step"], needed, strict=True)]
    assert all(BOUNDS[0] <= ratio <= BOUNDS[1] for ratio in ratios), f"measured / theory {ratios}, bounds {BOUNDS}"
    assert cell.bound and cell.split.busy >= 0.9 * cell.bound, f"busy {cell.split.busy}, lower bound {cell.bound}"
    assert cell.waiting.exchanges > 0, "the ranks' collectives are matched although their lines differ"
