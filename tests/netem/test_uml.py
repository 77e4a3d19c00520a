"""The `testbed` command of an ordinary user in a user-mode Linux kernel, whose links have delay and loss."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.results.receipt import Receipt
from testbed.spec.errors import Interrupted, RankFailed, UsageError
from tests.support.command import COMMAND, wait_for_steps
from tests.support.ordinary_user import USER, as_ordinary_user

pytestmark = [pytest.mark.netem, pytest.mark.gloo, pytest.mark.quiet]
SMALL = ("--on", "uml", "--model", "lenet5", "--data", "synthetic", "--batch", "64", "--set", "data.test_subset=64")
DELAYS_MS = (0, 5, 20, 50)  # by node, one way
LINKS: tuple[dict[str, str], ...] = ({"loss": "1%"}, {"delay": "5ms"}, {"delay": "20ms"}, {"delay": "50ms"})  # by node
UNPROBED = (*SMALL, "--nodes", "2", "--set", "probe=false")
# A model of the user's own, whose code tries to write outside of the run folder.
MODEL = """
from pathlib import Path
from torch import nn

def make(classes, channels):
    for place in ({home!r}, "/tmp", "/etc"):
        try:
            (Path(place) / "written").write_text("")
            print("wrote", place)
        except OSError as error:
            print("refused", place, error.strerror)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, classes))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder of the user's; pytest's own are root's."""
    folder = Path(tempfile.mkdtemp(prefix="ordinary-user-"))
    os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """Every command before `testbed` becomes the next one, so the pid is that of the controller."""
    pipe = subprocess.PIPE
    argv = as_ordinary_user([*COMMAND, *arguments], home)
    return subprocess.Popen(argv, cwd=home, stdout=pipe, stderr=pipe, text=True)


def run(home: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(home, *arguments)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def kernels(controller: int) -> list[str]:
    """The processes of a controller's kernel on this machine, and its folder."""
    mark = f"TESTBED_OWNER={controller}-".encode()
    found = [str(path) for path in Path(tempfile.gettempdir()).glob(f"testbed-{controller}-*-uml-*")]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found += [entry.name] if mark in (entry / "environ").read_bytes() else []
        except OSError:
            continue
    return found


def wait_until_gone(controller: int) -> list[str]:
    end = time.monotonic() + 10
    while (left := kernels(controller)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Any]:
    """The summary of one run, which tests here share; its folder is `ring` in the home folder."""
    links = [
        f"--set=overrides.node{node}.link.{key}={value}"
        for node, values in enumerate(LINKS)
        for key, value in ({"rate": "10mbit"} | values).items()
    ]
    flags = ["--nodes", "4", *links, "--steps", "6", "--keep-going", "--json", "--out", "ring"]
    code, out, err = run(home, "run", *SMALL, *flags)
    assert code in (0, 5), err
    (summary,) = json.loads(out)["runs"]
    return dict(summary)


def test_ring_trains_over_links_with_delay(whole: dict[str, Any], home: Path) -> None:
    """A step takes six messages, one after the other, each over all links at once."""
    assert whole["status"] in ("ok", "invalid") and whole["substrate"] == "uml", whole["reason"]
    assert whole["counter"] == "interface eth0" and any("one processor" in note for note in whole["notes"])
    assert whole["seconds_per_step"] > 0.075


def test_every_link_has_the_requested_delay_loss_and_rate(whole: dict[str, Any], home: Path) -> None:
    receipt = Receipt.read(home / "ring" / "receipt.json")
    assert receipt.valid() and whole["status"] == "ok", f"{whole['network']}; before: {whole['notes']}"
    ways = {(link.src, link.dst): link.way for link in receipt.links}
    requested = {(src, dst): round(1000 * way.rtt_requested) for (src, dst), way in ways.items() if way}
    assert requested == {(s, d): DELAYS_MS[s] + DELAYS_MS[d] for s in range(4) for d in range(4) if s != d}
    for link in receipt.links:
        assert link.way is not None and link.error is not None
        late, allowed = abs(link.way.rtt - link.way.rtt_requested), max(0.001, 0.05 * link.way.rtt_requested)
        assert late <= allowed, f"{link.src} -> {link.dst}: {link.way}"
        assert abs(link.error) <= 0.08, f"{link.src} -> {link.dst}: {link.error}"
        assert (link.way.packets >= 2000) == (link.src == 0)
    lost, packets = (sum(getattr(ways[0, dst], name) for dst in (1, 2, 3)) for name in ("lost", "packets"))
    assert abs(lost - 0.01 * packets) < 4.5 * math.sqrt(0.01 * 0.99 * packets), f"{lost} of {packets} packets lost"


def test_the_files_are_the_users(whole: dict[str, Any], home: Path) -> None:
    assert {path.stat().st_uid for path in (home / "ring").rglob("*")} == {USER}
    assert len(Receipt.read(home / "ring" / "receipt.json").links) == 12


def test_a_delay_between_racks_is_on_links_across_alone_and_the_uplink_is_shared(home: Path) -> None:
    """On links across the round trip has the uplink's delay in each direction."""
    racks = ["--set", "topology.racks=[[0, 1], [2]]", "--set", "topology.uplink=25mbit", "--set", "topology.delay=10ms"]
    flags = ["--nodes", "3", "--rate", "40mbit", *racks, "--mode", "hierarchical", "--steps", "3", "--batch", "12"]
    code, _, err = run(home, "run", *SMALL, *flags, "--keep-going", "--out", "racks")
    summary = json.loads((home / "racks" / "summary.json").read_text())
    receipt = Receipt.read(home / "racks" / "receipt.json")
    assert code == 0 and receipt.valid() and summary["replicas_agree"], (
        f"{receipt.sentence()}; {summary['notes']}; {err}"
    )
    for link in receipt.links:
        assert link.across == (2 in (link.src, link.dst)) and (link.way is not None) == link.across
        if link.way is not None:
            assert link.way.rtt_requested == pytest.approx(0.02)
            assert abs(link.way.rtt - 0.02) <= 0.001, f"{link.src} -> {link.dst}: {link.way}"
    assert len(receipt.uplinks) == 2 and {uplink.requested for uplink in receipt.uplinks} == {25_000_000}


def test_a_link_has_delay_jitter_and_loss_at_once(home: Path) -> None:
    values = {"rate": "10mbit", "delay": "20ms", "jitter": "4ms", "loss": "1%"}
    link = [f"--set=overrides.node1.link.{key}={value}" for key, value in values.items()]
    flags = ["--nodes", "2", "--rate", "10mbit", *link, "--steps", "3", "--keep-going", "--out", "jitter"]
    code, _, err = run(home, "run", *SMALL, *flags)
    summary = json.loads((home / "jitter" / "summary.json").read_text())
    receipt = Receipt.read(home / "jitter" / "receipt.json")
    assert code == 0 and receipt.valid(), f"{receipt.sentence()}; before: {summary['notes']}; {err}"
    ways = {(link.src, link.dst): link.way for link in receipt.links}
    for way in ways.values():
        assert way is not None and way.rtt_requested == pytest.approx(0.02)
        assert abs(way.rtt - 0.02) <= 0.001 + 0.75 * 0.004, way
    sent, received = ways[1, 0], ways[0, 1]
    assert sent is not None and sent.packets >= 2000 and received is not None and received.packets == 0
    assert abs(sent.lost - 0.01 * sent.packets) < 4.5 * math.sqrt(0.01 * 0.99 * sent.packets), sent


def test_only_the_run_folder_can_be_written(home: Path) -> None:
    (home / "mine.py").write_text(MODEL.format(home=str(home)))
    flags = ["--model", "mine.py:make", "--set", "faults=kill:rank1@step3", "--steps", "5", "--out", "mine"]
    code, _, err = run(home, "run", *UNPROBED, *flags)
    log = (home / "mine" / "rank0.log").read_text()
    assert log.count("Read-only file system") == 3 and "wrote" not in log, log
    assert not (home / "written").exists()
    assert code == RankFailed.exit_code and "rank 1" in err  # a fault is injected by the same names as elsewhere


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_controller_that_was_stopped(home: Path, signum: int) -> None:
    folder = home / f"stopped-{signum}"
    process = start(home, "run", *UNPROBED, "--rate", "200mbit", "--steps", "100000", "--out", str(folder))
    try:
        wait_for_steps(folder, 0, 3)
        assert len(kernels(process.pid)) > 4
    finally:
        process.send_signal(signum)
        _, said = process.communicate(timeout=30)
    if signum == signal.SIGINT:
        assert process.returncode == Interrupted.exit_code, said
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert wait_until_gone(process.pid) == []


def test_what_its_kernel_lacks_is_refused_before_the_run(home: Path) -> None:
    code, _, err = run(home, "run", *UNPROBED, "--set", "node.congestion=nonesuch", "--out", "refused")
    assert code == UsageError.exit_code and not (home / "refused").exists()
    assert "nonesuch" in err, err
