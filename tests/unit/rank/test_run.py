"""The parts of run_rank that need no process group: meeting rank 0, comparing requests, measuring, naming a failure."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from testbed.rank import run as module
from testbed.rank.request import Request, read_request
from testbed.rank.run import JoinedRun, wait_for_listener
from testbed.rank.watchdog import CLOSED, DONE
from testbed.results.folder import RunFolder
from testbed.results.receipt import LinkReceipt, Receipt
from testbed.results.records import Error, Step
from testbed.spec.errors import PeerLost, RankFailed

HERE = "127.0.0.1"


def request_of(rank: int = 0, **env: str) -> Request:
    return read_request([], {"NODES": "2", "RANK": str(rank), "MODEL": "lenet5", "DATA": "synthetic"} | env)


def run_of(request: Request, path: Path) -> JoinedRun:
    return JoinedRun(request.spec, RunFolder(path), [HERE] * request.spec.world)


def receipt(measured: float) -> Receipt:
    link = LinkReceipt(src=0, dst=1, requested=100, goodput=measured, measured=measured, error=measured / 100 - 1)
    return Receipt(links=(link,), fan_in=None, mtu=1500, congestion=("cubic",), duration=1.0)


# --- meeting rank 0 ------------------------------------------------------------------------------------------------


def test_a_rank_waits_until_rank_0_listens() -> None:
    with socket.socket() as later:
        later.bind((HERE, 0))
        threading.Timer(0.5, later.listen).start()
        begun = time.monotonic()
        wait_for_listener(HERE, later.getsockname()[1], timeout_s=30)
        assert 0.4 < time.monotonic() - begun < 10


def test_a_rank_0_that_never_listens_is_named_with_its_address() -> None:
    with socket.socket() as never:
        never.bind((HERE, 0))
        port = never.getsockname()[1]
        with pytest.raises(RankFailed, match=rf"rank 0 did not listen at {HERE}:{port} within 0.5 s"):
            wait_for_listener(HERE, port, timeout_s=0.5)


def test_a_name_that_does_not_resolve_ends_the_wait_early() -> None:
    with pytest.raises(RankFailed, match=r"the name 'nobody.invalid' does not resolve"):
        wait_for_listener("nobody.invalid", 1, timeout_s=60, gone_s=0.3)


UNREACHABLE = """
from testbed.rank.run import wait_for_listener
wait_for_listener("10.91.0.3", 1, timeout_s={timeout_s}, gone_s=0.3, same_subnet={same_subnet})
"""


@pytest.mark.net
@pytest.mark.parametrize(
    ("same_subnet", "timeout_s", "words"),
    [
        (True, 60, "rank 0 has ended or was never started: no machine has the address 10.91.0.3"),
        (False, 1, "within 1 s"),
    ],
)
def test_an_address_of_the_same_subnet_that_no_machine_has_ends_the_wait_early(
    same_subnet: bool, timeout_s: int, words: str
) -> None:
    """Elsewhere a router may say so while rank 0's machine starts."""
    code = UNREACHABLE.format(timeout_s=timeout_s, same_subnet=same_subnet)
    script = f"ip route add unreachable 10.91.0.3 && exec {sys.executable} -c {shlex.quote(code)}"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode and words in done.stderr.splitlines()[-1], done.stderr


# --- the same request on all ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"SEED": "3"}, "seed 3 on rank 1, 0 on rank 0"),
        ({"SET": "optimizer.lr=0.5"}, "optimizer.lr 0.5 on rank 1, 0.02 on rank 0"),
        ({"SHAPING": "egress"}, "SHAPING 'egress' on rank 1, 'both' on rank 0"),
        ({"SET": "overrides.node1.link.rate=1gbit"}, "overrides {'node1': "),
    ],
)
def test_the_first_key_that_differs_is_named(other: dict[str, str], words: str) -> None:
    own, leader = module._values(request_of(1, **other)), module._values(request_of())
    difference = module._difference(own, 1, leader)
    assert words in difference and "all ranks must get the same request" in difference


def test_equal_requests_do_not_differ() -> None:
    assert module._difference(module._values(request_of(1)), 1, module._values(request_of(0))) == ""


def test_synthetic_images_of_rank_0_are_no_difference_and_reach_the_spec() -> None:
    request = request_of(DATA="cifar10")
    final = module._final_spec(request.spec, "ring-n2-x", synthetic=True)
    assert (final.name, final.data.name, request.spec.data.name) == ("ring-n2-x", "synthetic", "cifar10")


# --- measuring -----------------------------------------------------------------------------------------------------


def test_a_first_probe_that_was_off_is_noted_and_the_second_counts(tmp_path: Path) -> None:
    request = request_of(RATE="1gbit")
    run, receipts = run_of(request, tmp_path), iter([receipt(80), receipt(100)])
    module._measure(request, run, lambda: next(receipts))
    assert len(run.notes) == 1 and "NOT within" in run.notes[0]
    assert run.invalid == "" and Receipt.read(run.folder.receipt) == receipt(100)


def test_a_network_that_is_off_twice_makes_the_run_invalid(tmp_path: Path) -> None:
    request = request_of(RATE="1gbit")
    run = run_of(request, tmp_path)
    module._measure(request, run, lambda: receipt(80))
    assert run.invalid == run.network == receipt(80).sentence()


def test_without_shaping_both_ways_a_receipt_is_not_judged(tmp_path: Path) -> None:
    request = request_of(RATE="1gbit", SHAPING="egress")
    run, receipts = run_of(request, tmp_path), iter([receipt(80)])
    module._measure(request, run, lambda: next(receipts))  # once
    assert run.invalid == "" and run.notes == []


def test_only_rank_0_writes_the_receipt(tmp_path: Path) -> None:
    request = request_of(1)
    run = run_of(request, tmp_path)
    module._measure(request, run, lambda: receipt(100))
    assert run.network.startswith("network: ") and not run.folder.receipt.exists()


# --- naming a failure ----------------------------------------------------------------------------------------------


class Reports:
    """What rank 0 needs of its heartbeat to name the failed rank."""

    step = 5
    steps = {1: 4, 2: 5}

    def __init__(self, ended: dict[int, str] | None = None, **reports: dict[str, Any]) -> None:
        self.ended = ended or {}
        self._reports = {int(name.removeprefix("rank")): report for name, report in reports.items()}

    def collect_reports(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        return self._reports


def cause(tmp_path: Path, record: Error, reports: Reports) -> str:
    run = run_of(request_of(NODES="3", BATCH="24"), tmp_path / "compose" / "ring-n3")
    return module._root_cause(record, run, reports)  # type: ignore[arg-type]


def test_the_reason_is_what_the_failed_rank_reports(tmp_path: Path) -> None:
    lost = Error(code=PeerLost.exit_code, message="rank 1 (node1) failed: OSError", failed_rank=1, at=0.0)
    reports = Reports(rank1={"code": 1, "message": "OSError: no space", "failed_rank": None})
    expected = "rank 1 (node1) ended with code 1 after step 4: OSError: no space. Then rank 0 lost it."
    assert cause(tmp_path, lost, reports) == f"{expected} See runs/compose/ring-n3/rank1.log"


def test_a_rank_that_reports_nothing_is_silent_since_its_last_step(tmp_path: Path) -> None:
    message = "rank 1 (node1) is silent for 5.0 s: frozen or cut off"
    lost = Error(code=PeerLost.exit_code, message=message, failed_rank=1, at=0.0)
    reports = Reports(rank2={"code": PeerLost.exit_code, "message": message, "failed_rank": 1})
    assert cause(tmp_path, lost, reports).startswith(
        f"rank 1 (node1) is silent since step 4; rank 0, rank 2 lost it ({message})."
    )


def test_a_rank_whose_connection_closed_without_a_report_has_ended(tmp_path: Path) -> None:
    message = "rank 1 (node1) is gone: its connection ended"
    lost = Error(code=PeerLost.exit_code, message=message, failed_rank=1, at=0.0)
    reports = Reports({1: CLOSED}, rank2={"code": PeerLost.exit_code, "message": message, "failed_rank": 1})
    assert cause(tmp_path, lost, reports).startswith(
        f"rank 1 (node1) ended after step 4; rank 0, rank 2 lost it ({message})."
    )


def test_steps_that_are_recorded_but_not_in_a_heartbeat_yet_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "compose" / "ring-n3")
    folder.path.mkdir(parents=True)
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update", "total", "loss"), 0.1)
    step = Step(step=8, epoch=0, images=8, sent=None, received=None, **times)
    folder.records(1).write_text(json.dumps(asdict(step)) + "\n")
    lost = Error(code=PeerLost.exit_code, message="rank 1 (node1) is gone", failed_rank=1, at=0.0)
    assert cause(tmp_path, lost, Reports({1: CLOSED})).startswith("rank 1 (node1) ended after step 9; rank 0 lost it")


def test_a_rank_that_has_trained_and_waits_for_the_summary_is_not_the_root_cause(tmp_path: Path) -> None:
    lost = Error(code=PeerLost.exit_code, message="rank 0 lost a peer", at=0.0)
    assert cause(tmp_path, lost, Reports({1: DONE, 2: CLOSED})).startswith("rank 2 (node2) ended after step 5")


def test_rank_0_that_fails_by_itself_names_itself(tmp_path: Path) -> None:
    record = Error(code=1, message="MemoryError: ", at=0.0)
    assert cause(tmp_path, record, Reports()).startswith("rank 0 (node0) ended with code 1 after step 5: MemoryError")
