"""`python -m testbed.rank` as real processes: the controller reads only files and exit codes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.results.conclude import summarise
from testbed.results.folder import RunFolder
from testbed.results.records import read
from testbed.spec.errors import Interrupted
from testbed.spec.run import SCHEMA, RunSpec
from tests.support.rank_pool import RankRun, free_port

pytestmark = pytest.mark.gloo

OWN_METHOD = """
import torch.distributed as dist


def mean_(buffer, group):
    dist.all_reduce(buffer)
    buffer.div_(group.size)
"""
PATIENCE = 120.0  # seconds for processes to start and end on a busy machine


def make(path: Path, **values: Any) -> RunFolder:
    small = {"model": "lenet5", "data": {"name": "synthetic", "subset": 64, "test_subset": 20}, "batch": 12, "steps": 4}
    folder = RunFolder(path / "run")
    folder.create(RunSpec.load(small | values, "test").with_files())
    return folder


def steps_done(folder: RunFolder, rank: int) -> int:
    return sum(record.kind == "step" for record in read(folder.records(rank)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the ranks did not get going"
        time.sleep(0.05)


def test_a_run_leaves_its_records_and_ends_with_0(tmp_path: Path) -> None:
    folder = make(tmp_path, nodes=2, mode="ring")
    with RankRun(folder.path, 2) as run:
        assert run.wait(PATIENCE) == [0, 0], run.log_of(0) + run.log_of(1)
    for rank in range(2):
        kinds = [record.kind for record in read(folder.records(rank))]
        assert kinds == ["start", "hash", *["step"] * 4, "hash", "eval", "end"]
    summary = summarise(folder, folder.read_spec(), status="ok")
    assert summary.replicas_agree is True
    assert summary.counter == "tcp sockets"
    gradients = 61_706 * 4
    assert summary.gradient_bytes == gradients
    for sent in (*summary.sent_per_step, *summary.received_per_step):  # the ring's 2(N-1)/N, and little else
        assert sent is not None and gradients <= sent < 1.02 * gradients


def test_a_users_own_method_trains_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_hand.py").write_text(OWN_METHOD)
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    folder = make(tmp_path, nodes=2, mode="by-hand")
    with RankRun(folder.path, 2) as run:
        assert run.wait(PATIENCE) == [0, 0], run.log_of(0)
    assert [record.agree for record in read(folder.records(1)) if record.kind == "hash"] == [True, True]


# --- nothing hangs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "victim"), [("ring", 1), ("gather", 0)])
def test_when_a_rank_is_killed_the_others_end_with_6_in_time(tmp_path: Path, mode: str, victim: int) -> None:
    folder = make(tmp_path, nodes=3, mode=mode, steps=100_000, deadline=30.0)
    others = [rank for rank in range(3) if rank != victim]
    with RankRun(folder.path, 3) as run:
        wait_until(lambda: steps_done(folder, victim) >= 3)
        run.processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(60.0, others) == [6, 6], run.log_of(others[0])
        assert time.monotonic() - killed < 40.0
    for rank in others:
        last = vars(list(read(folder.records(rank)))[-1])
        assert (last["kind"], last["code"]) == ("error", 6)
        assert last["message"] in run.log_of(rank)


def test_when_a_rank_freezes_the_others_end_with_6_after_the_deadline(tmp_path: Path) -> None:
    folder = make(tmp_path, nodes=2, mode="ring", steps=100_000, deadline=15.0)
    with RankRun(folder.path, 2) as run:
        wait_until(lambda: steps_done(folder, 1) >= 3)
        run.processes[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert run.wait(60.0, [0]) == [6], run.log_of(0)
        assert time.monotonic() - stopped < 35.0


def test_a_rank_that_never_comes_is_named_by_all_who_waited(tmp_path: Path) -> None:
    """Rank 0 ends first, and the store with it. The others must still name rank 3, not rank 0."""
    folder, port = make(tmp_path, nodes=4, mode="ring", start_deadline=15.0), free_port()
    with RankRun(folder.path, 3, WORLD_SIZE="4", MASTER_PORT=str(port)) as run:
        for late in run.processes[1:]:
            late.send_signal(signal.SIGSTOP)
        wait_until(lambda: listens(port))
        for late in run.processes[1:]:
            late.send_signal(signal.SIGCONT)
        assert run.wait(PATIENCE) == [6, 6, 6], [run.log_of(rank) for rank in range(3)]
    errors = [vars(list(read(folder.records(rank)))[-1]) for rank in range(3)]
    assert [error["failed_rank"] for error in errors] == [3, 3, 3], errors
    assert all("rank 3 (node3) did not connect" in error["message"] for error in errors), errors


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_rank_that_is_stopped_keeps_what_it_measured_and_ends_with_130(tmp_path: Path) -> None:
    folder = make(tmp_path, mode="single", steps=100_000)
    with RankRun(folder.path, 1) as run:
        wait_until(lambda: steps_done(folder, 0) >= 3)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.wait(30.0) == [Interrupted.exit_code]
    assert steps_done(folder, 0) >= 3
    assert vars(list(read(folder.records(0)))[-1])["message"] == "stopped by SIGTERM"


# --- bad input: one sentence, exit code 2 ------------------------------------------------------------------------


def assert_refused(run: RankRun, *words: str) -> None:
    with run:
        assert run.wait(PATIENCE)[0] == 2, run.log_of(0)
    assert len(run.log_of(0).strip().splitlines()) == 1, run.log_of(0)
    for word in words:
        assert word in run.log_of(0)


def test_a_spec_of_another_schema_is_refused_by_number(tmp_path: Path) -> None:
    folder = make(tmp_path, nodes=2)
    folder.spec.write_text(folder.spec.read_text().replace(f'"schema": {SCHEMA}', '"schema": 99'))
    assert_refused(RankRun(folder.path, 1), "schema 99", f"reads schema {SCHEMA}")
    assert not folder.records(0).exists()


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, nodes=2)
    assert_refused(RankRun(folder.path, 1, WORLD_SIZE="3"), "WORLD_SIZE 3: the spec is for 2 ranks")


@pytest.mark.parametrize(("variable", "value"), [("RANK", "two"), ("RANK", "2"), ("MASTER_PORT", "http")])
def test_a_variable_that_is_no_number_is_refused(tmp_path: Path, variable: str, value: str) -> None:
    folder = make(tmp_path, nodes=2)
    assert_refused(RankRun(folder.path, 1, WORLD_SIZE="2", **{variable: value}), variable, value)


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = make(tmp_path, mode="single")
    folder.spec.write_text(folder.spec.read_text().replace('"lenet5"', '"vgg99"'))
    assert_refused(RankRun(folder.path, 1), "'vgg99': unknown", "vgg11, resnet18, lenet5")


def test_a_port_in_use_is_refused_at_once(tmp_path: Path) -> None:
    folder = make(tmp_path, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(RankRun(folder.path, 1, WORLD_SIZE="2", MASTER_PORT=str(port)), f"port {port} on 127.0.0.1")
