"""Time dilation on shaped links: the network is slower, and what is read of the run is as if it were not."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

import testbed
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.records import Step, read

pytestmark = [pytest.mark.net, pytest.mark.quiet]
LAYER = ProfiledLayer(name="0", sizes=(500_000,), forward_s=0.03, backward_s=0.06)
PROFILE = Profile(
    model="lenet5", batch_per_rank=4, layers=(LAYER,), data_s=0.001, zero_s=0.001, loss_s=0.002, optimizer_s=0.006
)
WIRE_S = 2 * 2 / 3 * 500_000 * 8 / 50e6  # of the ring on three nodes


def test_a_dilated_run_has_the_times_of_the_network_it_stands_for(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    run = testbed.run(
        **{"on": "netns", "mode": "ring", "nodes": 3, "rate": "50mbit", "model": "lenet5", "batch_per_rank": 4},
        **{"steps": 12, "compute": f"emulated:{tmp_path / 'p.json'}", "dilation": 3.0},
        **{"out": tmp_path / "run", "allow_concurrent": True, "keep_going": True, "quiet": True},
    )
    summary, folder = run.summary, RunFolder(tmp_path / "run")
    assert summary.status in ("ok", "invalid") and summary.replicas_agree and summary.spec.dilation == 3.0
    assert run.receipt is not None
    assert {link.requested for link in run.receipt.links} == {50_000_000}
    raw = json.loads(folder.receipt.read_text())
    assert {link["requested"] for link in raw["links"]} == {16_666_667}
    least = PROFILE.step_s + WIRE_S
    assert summary.seconds_per_step is not None
    assert 0.95 * least < summary.seconds_per_step < 1.6 * least, "on a busy machine it may take longer"
    in_file = [each.total for each in read(folder.records(0), raw=True) if isinstance(each, Step)]
    as_read = [each.total for each in read(folder.records(0)) if isinstance(each, Step)]
    assert statistics.median(in_file) == pytest.approx(3 * statistics.median(as_read))
