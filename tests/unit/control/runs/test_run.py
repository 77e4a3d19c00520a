"""The life of one run above the seam: what it refuses, what it writes down, and what it does when things go wrong."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.control.cli.progress import Silent
from testbed.control.runs import select, supervisor
from testbed.control.runs.commands import where_it_was
from testbed.control.runs.run import _complaint, execute, probe, resume
from testbed.control.runs.select import Place
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.fake import FakeSubstrate
from testbed.control.substrates.process import ProcessSubstrate
from testbed.net.tcp import efficiency
from testbed.results.conclude import Summary
from testbed.results.faults import fault_table
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.errors import Interrupted, NetworkInvalid, RankFailed, SpecError, TestbedError, UsageError
from testbed.spec.link import Link
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import BAD, GOOD, WORSE, FakePlace, ends_well_while_waiting, ends_with, well


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePlace:
    monkeypatch.setattr(supervisor, "GRACE", 0.1)
    monkeypatch.setattr(supervisor, "POLL", 0.01)
    return FakePlace(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "r")


@pytest.fixture
def _signals_come_back() -> Iterator[None]:
    """An interrupted run is deaf from then on; pytest must not be."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def spec(**values: Any) -> RunSpec:
    small = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "nodes": 2, "steps": 6}
    return RunSpec.load(small | {"link": {"rate": "200mbit"}} | values, "test")


def run(fake: FakePlace, folder: RunFolder, **values: Any) -> Summary:
    return execute(spec(**values), fake.place, folder, Silent())


# --- when all goes well ------------------------------------------------------------------------------------------


def test_a_run_enters_shares_its_folder_starts_every_rank_and_leaves(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    summary = run(fake, folder)
    assert fake.calls == ["enter", "prepare_folder", "start", "start", "exit"]
    assert (summary.status, summary.steps, summary.replicas_agree, summary.substrate) == ("ok", 4, True, "fake")
    assert summary == Summary.read(folder)
    assert folder.read_spec() == spec() and Receipt.read(folder.receipt) == GOOD


def test_a_rank_gets_torchruns_contract_and_its_own_interface(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    run(fake, folder, port=4321, threads=2)
    starts = [call for call in fake.made[0].calls if call[0] == "start"]
    for rank, (_, node, argv, env, quota) in enumerate(starts):
        assert (node, argv[1:3], quota) == (rank, ("-m", "testbed.rank"), True)
        assert env["RANK"] == str(rank) and env["WORLD_SIZE"] == "2" and env["OMP_NUM_THREADS"] == "2"
        assert env["MASTER_ADDR"] == fake.made[0].nodes[0].address and env["MASTER_PORT"] == "4321"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_one_node_has_no_network_to_measure(fake: FakePlace, folder: RunFolder) -> None:
    assert run(fake, folder, mode="single").network == "one node, no network"
    assert not folder.receipt.exists()


def test_a_run_that_is_not_probed_says_so(fake: FakePlace, folder: RunFolder) -> None:
    summary = run(fake, folder, probe=False)
    assert summary.status == "ok" and summary.notes == ["probe = false: nobody checked the network"]


# --- the receipt -------------------------------------------------------------------------------------------------


def test_a_network_that_is_off_twice_makes_the_run_invalid_and_both_looks_are_told(
    fake: FakePlace, folder: RunFolder
) -> None:
    fake.receipts = iter([WORSE, BAD])
    summary = run(fake, folder)
    assert (summary.status, summary.reason) == ("invalid", BAD.sentence())
    assert summary.notes == [f"first probe: {WORSE.sentence()}"]
    assert Receipt.read(folder.receipt) == BAD
    assert summary.steps == 4  # it trained all the same
    assert Summary.read(folder).status == "invalid"


def test_a_network_that_is_off_once_gets_a_second_look_which_counts(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([BAD, GOOD])
    summary = run(fake, folder)
    assert (summary.status, summary.reason, summary.network) == ("ok", "", GOOD.sentence())
    assert summary.notes == [f"first probe: {BAD.sentence()}"]
    assert Receipt.read(folder.receipt) == GOOD


def test_a_good_network_is_measured_once(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])  # a second look would find nothing to hand out
    assert run(fake, folder).notes == []


# --- when things go wrong ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_signals_come_back")
def test_ctrl_c_during_the_probe_stops_everything_and_leaves_a_summary(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([KeyboardInterrupt])
    with pytest.raises(Interrupted, match=str(folder.path)):
        run(fake, folder)
    assert fake.calls == ["enter", "prepare_folder", "stop", "exit"]
    summary = Summary.read(folder)
    assert (summary.status, summary.reason, summary.steps) == ("interrupted", "stopped by Ctrl-C", 0)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a second Ctrl-C must not interrupt the putting away


@pytest.mark.usefixtures("_signals_come_back")
def test_ctrl_c_during_training_keeps_what_was_measured(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    fake.receipts = iter([GOOD])
    monkeypatch.setattr("testbed.control.runs.run.follow", interrupted)
    with pytest.raises(Interrupted):
        run(fake, folder)
    assert fake.calls[-2:] == ["stop", "exit"]
    assert Summary.read(folder).status == "interrupted" and len(Summary.read(folder).losses) == 6


def test_a_probe_that_fails_fails_the_run(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([NetworkInvalid])
    with pytest.raises(NetworkInvalid):
        run(fake, folder)
    assert Summary.read(folder).status == "failed" and fake.calls[-2:] == ["stop", "exit"]


def test_a_ranks_refusal_is_the_users_mistake(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    fake.play = ends_with(2, "model 'vgg99': unknown. Use vgg11.")
    with pytest.raises(UsageError, match=r"^model 'vgg99': unknown\. Use vgg11\.$") as refusal:
        run(fake, folder)
    assert refusal.value.exit_code == 2
    assert Summary.read(folder).status == "failed" and fake.calls[-2:] == ["stop", "exit"]


def test_a_rank_that_broke_is_named_and_the_others_are_stopped(fake: FakePlace, folder: RunFolder) -> None:
    def play(where: RunFolder, rank: int) -> int | None:
        well(where, rank)
        return -signal.SIGKILL if rank == 1 else None  # rank 0 waits for it for ever

    fake.receipts, fake.play = iter([GOOD]), play
    with pytest.raises(RankFailed, match=r"rank 1 \(node1\) was killed by SIGKILL after step 6"):
        run(fake, folder)
    summary = Summary.read(folder)
    assert summary.status == "failed" and "rank 1" in summary.reason and fake.calls[-2:] == ["stop", "exit"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_everything_and_is_told_in_a_sentence(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.receipts = iter([GOOD])
    monkeypatch.setattr(Receipt, "write", full)
    with pytest.raises(TestbedError, match=rf"^{folder.path}: No space left on device.*Make room") as error:
        run(fake, folder)
    assert error.value.exit_code == 1 and fake.calls[-2:] == ["stop", "exit"]
    summary = Summary.read(folder)
    assert summary.status == "failed" and "No space left" in summary.reason


def test_a_summary_that_cannot_be_written_does_not_hide_which_rank_broke(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.receipts, fake.play = iter([GOOD]), ends_with(3, "boom")
    monkeypatch.setattr("testbed.results.conclude.write_whole", full)
    with pytest.raises(RankFailed, match=r"rank 0 \(node0\) ended with code 3 .*boom"):
        run(fake, folder)
    assert not folder.summary.exists()


def test_a_good_run_whose_summary_cannot_be_written_is_none(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.receipts = iter([GOOD])
    monkeypatch.setattr("testbed.results.conclude.write_whole", full)
    with pytest.raises(TestbedError, match=r"r/summary\.json: No space left on device.*Make room"):
        run(fake, folder)


# --- faults on purpose, and going on -----------------------------------------------------------------------------


def test_a_fault_that_a_place_cannot_do_is_refused_before_anything_is_made(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    unable = replace(select.KINDS["fake"], faults=("kill",))
    monkeypatch.setattr(select, "KINDS", {**select.KINDS, "fake": unable})
    with pytest.raises(SpecError, match=r"^fault 'cut:rank0@step3': cannot be done on fake, where these can: kill\. "):
        run(fake, folder, probe=False, faults=["kill:rank1@step2", "cut:rank0@step3"])
    assert fake.made == [] and not folder.path.exists()


def test_a_fault_that_never_came_due_is_told_by_a_note_and_by_its_row(fake: FakePlace, folder: RunFolder) -> None:
    summary = run(fake, folder, probe=False, faults=["kill:rank1@step5", "cut:rank0@3600s"])
    missed = ["kill:rank1@step5", "cut:rank0@3600s"]
    assert summary.status == "ok" and summary.notes[1:] == [f"fault {fault} never came due" for fault in missed]
    ((_, faults, *_, codes, recovered),) = fault_table([(folder, summary.spec, summary.status)])
    assert faults == " ".join(f"{fault} (not injected)" for fault in missed)
    assert (codes, recovered) == ("0 0", "-")


def test_a_resumed_run_says_after_which_step(fake: FakePlace, folder: RunFolder) -> None:
    def play(where: RunFolder, rank: int) -> int:
        where.set_records_aside(rank)
        well(where, rank)
        lines = where.records(rank).read_text().splitlines()
        marked = [line.replace('"attempt":null', '"attempt":1') for line in lines[:5]]  # the start, and four steps
        where.records(rank).write_text("\n".join([*marked, *lines[5:]]) + "\n")
        return 0

    fake.play = ends_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False)
    fake.play = play
    summary = resume(fake.place, folder, Silent(), retries=0)
    assert summary.status == "ok" and summary.notes[-1].startswith("resumed after step 4:")


# --- refused before anything exists ------------------------------------------------------------------------------


def test_a_folder_that_exists_is_refused_and_not_touched(fake: FakePlace, folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.summary.write_text("precious")
    with pytest.raises(UsageError, match=r"exists.*--out"):
        run(fake, folder)
    assert [(path.name, path.read_text()) for path in folder.path.iterdir()] == [("summary.json", "precious")]
    assert fake.calls == ["enter", "exit"]


@pytest.mark.parametrize("key", ["subset", "test_subset"])
def test_more_images_than_there_are_is_refused_before_anything_exists(
    fake: FakePlace, folder: RunFolder, key: str
) -> None:
    with pytest.raises(SpecError, match=rf"data\.{key} 10000000: synthetic has \d+ such images\. Ask for fewer"):
        run(fake, folder, data={"name": "synthetic", key: 10_000_000})
    assert not folder.path.exists() and fake.made == []


def test_a_resumed_run_tells_of_the_spec_that_its_folder_has(fake: FakePlace, folder: RunFolder) -> None:
    """Its faults are over, and still it is the run that had them: the report refuses one whose two specs differ."""
    fake.play = ends_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False, faults=["kill:rank1@step2"], retries=0)
    before = folder.faults.read_text()
    fake.play = well
    summary = resume(fake.place, folder, Silent(), retries=1)
    assert summary.status == "ok"
    assert summary.spec == folder.read_spec()
    assert folder.faults.read_text() == before


def test_a_run_is_resumed_only_where_it_began(fake: FakePlace, folder: RunFolder) -> None:
    fake.receipts, fake.play = iter([GOOD]), ends_with(1, "out of luck")
    with pytest.raises(TestbedError):
        run(fake, folder)
    with pytest.raises(
        SpecError, match=r"began on fake, and half a run there and half on other is no run. Use --on fake"
    ):
        resume(Place("other", "for tests", True), folder, Silent(), retries=0)


def test_a_run_whose_controller_was_killed_is_resumed_only_where_it_began(fake: FakePlace, folder: RunFolder) -> None:
    run(fake, folder, probe=False)
    folder.summary.unlink()  # as a killed controller leaves it
    assert where_it_was(folder.path) == "fake"
    with pytest.raises(SpecError, match=r"began on fake, and half a run there .*Use --on fake"):
        resume(Place("other", "for tests", True), folder, Silent(), retries=0)
    assert resume(fake.place, folder, Silent(), retries=0).status == "ok"


def test_a_folder_of_old_says_only_in_its_summary_where_it_began(fake: FakePlace, folder: RunFolder) -> None:
    run(fake, folder, probe=False)
    folder.substrate.unlink()
    assert where_it_was(folder.path) == "fake"
    folder.summary.unlink()
    assert where_it_was(folder.path) == "auto"
    assert resume(Place("other", "for tests", True), folder, Silent(), retries=0).status == "ok"


def test_a_run_that_another_finished_while_we_waited_is_not_opened_again(
    fake: FakePlace, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.play = ends_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False)
    fake.play = well
    monkeypatch.setattr("testbed.control.runs.run.alone", ends_well_while_waiting(folder))
    with pytest.raises(UsageError, match=r"r is finished, nothing is left to resume"):
        resume(fake.place, folder, Silent(), retries=0)
    assert Summary.read(folder).status == "ok"


def measure_as_requested(node: int, argv: Sequence[str], log: Path) -> int:
    """A probe of two nodes that measures exactly what was requested."""
    size = round(10**8 * efficiency(1500) / 8)
    flows = [{"src": src, "dst": dst, "bytes": size, "seconds": 1.0} for src, dst in ((0, 1), (1, 0), (None, 0))]
    flow = {"event": "flow", "step": 1, "of": 3, "src": 0, "dst": 1, "goodput": size * 8}
    result = {
        "event": "result",
        "flows": flows,
        "mtu": 1500,
        "congestion": ["cubic", "cubic"],
        "seconds": 4.0,
        "clocks": [],
    }
    log.write_text("a warning that is no JSON\n" + json.dumps(flow) + "\n" + json.dumps(result) + "\n")
    return 0


def test_a_probe_is_one_process_per_node_outside_the_quota() -> None:
    plans = [NodePlan(name=f"node{k}", link=Link(rate=10**8)) for k in range(2)]
    events: list[dict[str, Any]] = []
    with FakeSubstrate(2, measure_as_requested) as substrate:
        receipt = probe(substrate, plans, events.append)
    starts = [call for call in substrate.calls if call[0] == "start"]
    assert [call[1] for call in starts] == [0, 1] and not any(call[-1] for call in starts)
    assert receipt.valid() and receipt.worst_error == pytest.approx(0, abs=1e-6) and len(events) == 2


def test_a_failed_probe_says_why_in_the_nodes_words() -> None:
    def fail(node: int, argv: Sequence[str], log: Path) -> int:
        log.write_text(json.dumps({"event": "error", "rank": node, "sentence": "node1 left the probe"}) + "\n")
        return 1

    with FakeSubstrate(2, fail) as substrate:
        with pytest.raises(NetworkInvalid, match=r"failed: node1 left the probe\. Try again.*probe=false"):
            probe(substrate, [NodePlan(name=f"node{k}") for k in range(2)], lambda event: None)


def test_a_probe_of_plain_processes_is_unshaped() -> None:
    plans = [NodePlan(name=f"node{k}", link=Link(rate=10**8)) for k in range(2)]
    with ProcessSubstrate(plans) as substrate:
        receipt = probe(substrate, plans, lambda event: None)
    assert receipt.worst_error is None and len(receipt.links) == 2 and receipt.fan_in is not None


def test_a_probe_that_failed_names_nodes_as_the_user_does(tmp_path: Path) -> None:
    logs = [tmp_path / "anna.log", tmp_path / "node0.log"]
    logs[0].write_text(json.dumps({"event": "error", "sentence": "node0: no connection from node1"}) + "\n")
    assert "failed: anna: no connection from node0; no end of it on node0. Try" in _complaint([1, None], logs)
