"""One run on a fake substrate: what it refuses, what it writes, and what it does when something fails."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.control.runs.progress import Silent
from testbed.control.runs.run import INTERRUPTS, _probe_error, execute, probe, recorded_substrate, resume_run
from testbed.control.runs.select import SubstrateChoice
from testbed.control.runs.supervisor import Timing
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.fake import FakeSubstrate
from testbed.control.substrates.process import ProcessSubstrate
from testbed.net.shaping import Bucket, Shaping
from testbed.net.tcp import efficiency
from testbed.results.conclude import Summary
from testbed.results.faults import fault_table
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.errors import EngineLost, Interrupted, NetworkInvalid, RankFailed, SpecError, TestbedError, UsageError
from testbed.spec.link import Link
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import (
    BAD,
    GOOD,
    PROBE,
    RATE,
    WORSE,
    FakeRuns,
    RankScript,
    fails_with,
    finishes_while_waiting,
    succeeds,
)


@pytest.fixture
def fake() -> FakeRuns:
    return FakeRuns()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "r")


def spec(**values: Any) -> RunSpec:
    small = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "nodes": 2, "steps": 6}
    return RunSpec.load(small | {"link": {"rate": "200mbit"}} | values, "test")


def run(fake: FakeRuns, folder: RunFolder, **values: Any) -> Summary:
    return execute(spec(**values), fake.choice, folder, Silent(), timing=Timing(grace_s=0.1, poll_s=0.01))


def resume(fake: FakeRuns, folder: RunFolder, choice: SubstrateChoice | None = None, retries: int = 0) -> Summary:
    return resume_run(folder.read_spec(), choice or fake.choice, folder, Silent(), retries)


def other(fake: FakeRuns) -> SubstrateChoice:
    return SubstrateChoice(fake.named("other"), "for tests")


# --- when all goes well ------------------------------------------------------------------------------------------


def test_a_run_creates_its_nodes_shares_its_folder_starts_every_rank_and_removes_the_nodes(
    fake: FakeRuns, folder: RunFolder
) -> None:
    fake.receipts = iter([GOOD])
    summary = run(fake, folder)
    assert fake.calls == ["enter", "prepare_folder", "start", "start", "exit"]
    assert (summary.status, summary.steps, summary.replicas_agree, summary.substrate) == ("ok", 4, True, "fake")
    assert summary == Summary.read(folder)
    assert folder.read_spec() == spec() and Receipt.read(folder.receipt) == GOOD


def test_a_rank_gets_torchruns_variables_and_its_own_interface(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    run(fake, folder, port=4321, threads=2)
    starts = [call for call in fake.made[0].calls if call[0] == "start" and PROBE not in call[2]]
    for rank, (_, node, argv, env, quota) in enumerate(starts):
        assert (node, argv[1:4], quota) == (rank, ("-P", "-m", "testbed.rank"), True)
        assert env["RANK"] == str(rank) and env["WORLD_SIZE"] == "2" and env["OMP_NUM_THREADS"] == "2"
        assert env["MASTER_ADDR"] == fake.made[0].nodes[0].address and env["MASTER_PORT"] == "4321"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_size_that_nodes_cannot_have_is_refused_before_anything_is_made(fake: FakeRuns, folder: RunFolder) -> None:
    def refuse_size(spec: RunSpec) -> None:
        raise SpecError("memory limit: too small")

    choice = SubstrateChoice(fake.named("small", check_size=refuse_size), "for tests")
    with pytest.raises(SpecError, match="too small"):
        execute(spec(), choice, folder, Silent())
    assert fake.made == [] and not folder.path.exists()


def test_one_node_has_no_network_to_measure(fake: FakeRuns, folder: RunFolder) -> None:
    assert run(fake, folder, mode="single").network == "one node, no network"
    assert not folder.receipt.exists()


def test_a_run_that_is_not_probed_has_a_note(fake: FakeRuns, folder: RunFolder) -> None:
    summary = run(fake, folder, probe=False)
    assert summary.status == "ok" and summary.notes == ["probe = false: the network was not checked"]


# --- the receipt -------------------------------------------------------------------------------------------------


def test_a_network_that_is_off_twice_makes_the_run_invalid_and_both_receipts_are_noted(
    fake: FakeRuns, folder: RunFolder
) -> None:
    fake.receipts = iter([WORSE, BAD])
    summary = run(fake, folder, keep_going=True)
    assert (summary.status, summary.reason) == ("invalid", BAD.sentence())
    assert summary.notes == [f"first probe: {WORSE.sentence()}"]
    assert Receipt.read(folder.receipt) == BAD
    assert summary.steps == 4  # it trained
    assert Summary.read(folder).status == "invalid"


def test_a_network_that_is_off_twice_ends_the_run_before_training(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([WORSE, BAD])
    summary = run(fake, folder)
    assert fake.calls == ["enter", "prepare_folder", "exit"]  # no rank was started
    assert (summary.status, summary.steps) == ("invalid", 0)
    assert summary.reason.startswith(BAD.sentence()) and "Nothing was trained" in summary.reason
    assert "--keep-going" in summary.reason and Summary.read(folder) == summary
    assert Receipt.read(folder.receipt) == BAD


def test_a_network_that_is_off_once_is_measured_again_and_the_second_receipt_counts(
    fake: FakeRuns, folder: RunFolder
) -> None:
    fake.receipts = iter([BAD, GOOD])
    summary = run(fake, folder)
    assert (summary.status, summary.reason, summary.network) == ("ok", "", GOOD.sentence())
    assert summary.notes == [f"first probe: {BAD.sentence()}"]
    assert Receipt.read(folder.receipt) == GOOD


def test_a_good_network_is_measured_once(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])  # a second probe would find no receipt
    assert run(fake, folder).notes == []


# --- the network after training ----------------------------------------------------------------------------------


def shaped(rate: int = RATE, size: int = 0) -> Shaping:
    """A node's link at 200mbit whose buckets have `rate`, and have passed `size` bytes."""
    return Shaping(RATE, {device: Bucket(rate, size) for device in ("eth0", "ifb0")})


def test_a_network_that_stays_as_requested_is_probed_again_and_the_receipt_has_both(
    fake: FakeRuns, folder: RunFolder
) -> None:
    fake.receipts, fake.shapings = iter([GOOD]), iter([shaped()] * 2 + [shaped(size=10**6)] * 2)
    summary = run(fake, folder)
    assert (summary.status, summary.reason, summary.notes) == ("ok", "", [])
    receipt = Receipt.read(folder.receipt)
    assert receipt.after is not None and receipt.after == GOOD and receipt.links == GOOD.links


def test_shaping_that_is_gone_after_training_makes_the_run_invalid(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.shapings = iter([GOOD]), iter([shaped()] * 2 + [shaped(size=10**6), Shaping(RATE)])
    summary = run(fake, folder)
    assert (summary.status, summary.steps) == ("invalid", 4)
    assert summary.reason == (
        "after training: node1: egress is not shaped as requested: requested 200mbit, found no token bucket on eth0"
    )
    assert Receipt.read(folder.receipt).after is None


def test_a_wrong_rate_before_training_ends_the_run_there(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.shapings = iter([GOOD]), iter([shaped(), shaped(rate=10**8)])
    summary = run(fake, folder)
    assert (summary.status, summary.steps) == ("invalid", 0) and "--keep-going" in summary.reason
    assert "node1: egress is not shaped as requested: requested 200mbit, found 100mbit on eth0" in summary.reason


def test_a_sample_that_is_slow_twice_is_a_note(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.samples = iter([GOOD]), iter([WORSE, BAD])
    fake.shapings = iter([shaped()] * 2 + [shaped(size=10**6)] * 2)
    summary = run(fake, folder)
    assert (summary.status, summary.reason, summary.notes) == ("ok", "", [f"after training: {BAD.sentence()}"])
    assert Receipt.read(folder.receipt).after == BAD


def test_a_sample_that_is_off_once_is_measured_again(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.samples = iter([GOOD]), iter([WORSE, GOOD])
    fake.shapings = iter([shaped()] * 2 + [shaped(size=10**6)] * 2)
    assert run(fake, folder).status == "ok" and Receipt.read(folder.receipt).after == GOOD


def test_without_a_probe_the_shaping_is_still_compared(fake: FakeRuns, folder: RunFolder) -> None:
    fake.shapings = iter([shaped()] * 2 + [shaped()] * 2)  # the steps sent bytes that passed no bucket
    summary = run(fake, folder, probe=False)
    assert summary.status == "invalid" and "of the steps passed the token bucket on eth0" in summary.reason


def test_one_node_with_a_rate_has_no_network_to_check(fake: FakeRuns, folder: RunFolder) -> None:
    """With SHAPING=egress its link has no ingress bucket either."""
    fake.shapings = itertools.repeat(Shaping(RATE, {"eth0": Bucket(RATE)}))
    summary = run(fake, folder, mode="single")
    assert (summary.status, summary.reason, summary.network) == ("ok", "", "one node, no network")


def test_an_engine_that_is_lost_right_after_training_fails_the_run(fake: FakeRuns, folder: RunFolder) -> None:
    def shapings() -> Iterator[Shaping]:
        yield from [shaped()] * 2
        raise EngineLost("the Docker engine stopped answering")

    fake.receipts, fake.shapings = iter([GOOD]), shapings()
    with pytest.raises(EngineLost, match="stopped answering at step 6"):
        run(fake, folder)
    assert Summary.read(folder).status == "failed"


# --- when things go wrong ----------------------------------------------------------------------------------------


def test_ctrl_c_during_the_probe_stops_everything_and_leaves_a_summary(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([KeyboardInterrupt])
    with pytest.raises(Interrupted, match=str(folder.path)):
        run(fake, folder)
    assert fake.calls == ["enter", "prepare_folder", "stop", "exit"]
    summary = Summary.read(folder)
    assert (summary.status, summary.reason, summary.steps) == ("interrupted", "stopped by Ctrl-C", 0)


def test_ctrl_c_is_reported_as_such_even_if_the_summary_cannot_be_written(fake: FakeRuns, folder: RunFolder) -> None:
    class Interrupting(Silent):
        def step(self, rank: int, record: dict[str, Any]) -> None:
            folder.summary.mkdir()
            raise KeyboardInterrupt

    fake.receipts = iter([GOOD])
    with pytest.raises(Interrupted, match="without a summary"):
        execute(spec(), fake.choice, folder, Interrupting())
    assert fake.calls[-2:] == ["stop", "exit"]


def test_an_error_inside_the_callers_own_handling_of_ctrl_c_stays_what_it_is(fake: FakeRuns, folder: RunFolder) -> None:
    fake.play, fake.receipts = fails_with(1, "no luck"), iter([GOOD])
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RankFailed, match="no luck"):
            run(fake, folder)


def test_ctrl_c_during_training_keeps_what_was_measured(fake: FakeRuns, folder: RunFolder) -> None:
    class Interrupting(Silent):
        def step(self, rank: int, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    fake.receipts = iter([GOOD])
    with pytest.raises(Interrupted):
        execute(spec(), fake.choice, folder, Interrupting())
    assert fake.calls[-2:] == ["stop", "exit"]
    assert Summary.read(folder).status == "interrupted" and len(Summary.read(folder).losses) == 6


def test_a_second_ctrl_c_does_not_interrupt_the_clean_up_and_handlers_are_restored_after_it(
    fake: FakeRuns, folder: RunFolder
) -> None:
    during: list[object] = []

    class Watched(FakeSubstrate):
        def stop(self) -> None:
            during.extend(signal.getsignal(number) for number in INTERRUPTS)

        def __exit__(self, *exception: object) -> None:
            during.extend(signal.getsignal(number) for number in INTERRUPTS)

    def interrupt(node: int, argv: object, log: Path) -> int:
        raise KeyboardInterrupt

    before = [signal.getsignal(number) for number in INTERRUPTS]
    watched = replace(fake.type, make=lambda spec, folder: Watched(2, interrupt))
    with pytest.raises(Interrupted):
        execute(spec(), SubstrateChoice(watched, "for tests"), folder, Silent())
    assert during == [signal.SIG_IGN] * 6
    assert [signal.getsignal(number) for number in INTERRUPTS] == before


def test_a_run_in_another_thread_leaves_signals_alone(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, fake, folder).result().status == "ok"


def test_a_probe_that_fails_fails_the_run(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([NetworkInvalid])
    with pytest.raises(NetworkInvalid):
        run(fake, folder)
    assert Summary.read(folder).status == "failed" and fake.calls[-2:] == ["stop", "exit"]


def test_a_ranks_refusal_is_raised_as_a_usage_error(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts = iter([GOOD])
    fake.play = fails_with(2, "model 'vgg99': unknown. Use vgg11.")
    with pytest.raises(UsageError, match=r"^model 'vgg99': unknown\. Use vgg11\.$") as refusal:
        run(fake, folder)
    assert refusal.value.exit_code == UsageError.exit_code
    assert Summary.read(folder).status == "failed" and fake.calls[-2:] == ["stop", "exit"]


def test_a_rank_that_failed_is_named_and_the_others_are_stopped(fake: FakeRuns, folder: RunFolder) -> None:
    def play(where: RunFolder, rank: int) -> int | None:
        succeeds(where, rank)
        return -signal.SIGKILL if rank == 1 else None  # rank 0 does not end

    fake.receipts, fake.play = iter([GOOD]), play
    with pytest.raises(RankFailed, match=r"rank 1 \(node1\) was killed by SIGKILL after step 6"):
        run(fake, folder)
    summary = Summary.read(folder)
    assert summary.status == "failed" and "rank 1" in summary.reason and fake.calls[-2:] == ["stop", "exit"]


def unwritable(path: Path, play: RankScript = succeeds) -> RankScript:
    """Ranks that play, and a folder where a file must be written: the write fails as on a broken disk."""

    def playing(where: RunFolder, rank: int) -> int | None:
        path.mkdir(exist_ok=True)
        return play(where, rank)

    return playing


def test_a_file_that_cannot_be_written_stops_everything_and_is_one_sentence(fake: FakeRuns, folder: RunFolder) -> None:
    def receipts() -> Iterator[Receipt]:
        folder.receipt.mkdir()
        yield GOOD

    fake.receipts = receipts()
    with pytest.raises(TestbedError, match=r"Is a directory, so nothing was finished\.") as error:
        run(fake, folder)
    assert error.value.exit_code == TestbedError.exit_code and fake.calls[-2:] == ["stop", "exit"]
    summary = Summary.read(folder)
    assert summary.status == "failed" and "Is a directory" in summary.reason


def test_a_summary_that_cannot_be_written_does_not_hide_which_rank_failed(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.play = iter([GOOD]), unwritable(folder.summary, fails_with(3, "boom"))
    with pytest.raises(RankFailed, match=r"rank 0 \(node0\) ended with code 3 .*boom"):
        run(fake, folder)
    assert folder.summary.is_dir()


@pytest.mark.parametrize(("trained", "when"), [(True, "at step 6"), (False, "before the first step")])
def test_a_run_that_loses_its_engine_says_when_names_its_folder_and_writes_the_summary(
    fake: FakeRuns, folder: RunFolder, trained: bool, when: str
) -> None:
    def lose(folder: RunFolder, rank: int) -> int | None:
        if rank == 0 and trained:
            return succeeds(folder, rank)
        raise EngineLost("the engine stopped answering")

    fake.receipts, fake.play = iter([GOOD]), lose
    with pytest.raises(EngineLost, match=rf"the engine stopped answering {when}\. .* --resume") as lost:
        run(fake, folder)
    assert lost.value.exit_code == 3 and lost.value.folder == folder.path and str(folder.path) in str(lost.value)
    summary = Summary.read(folder)
    assert (summary.status, summary.reason) == ("failed", str(lost.value))
    assert fake.calls[-2:] == ["stop", "exit"]


def test_a_good_run_whose_summary_cannot_be_written_fails(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.play = iter([GOOD]), unwritable(folder.summary)
    with pytest.raises(TestbedError, match=r"summary\.json.*: Is a directory, so nothing was finished\."):
        run(fake, folder)


# --- faults and resuming ---------------------------------------------------------------------------------------


def test_a_fault_that_a_substrate_cannot_inject_is_refused_before_anything_is_made(
    fake: FakeRuns, folder: RunFolder
) -> None:
    fake.choice = SubstrateChoice(fake.named("fake", faults=("kill",)), "for tests")
    with pytest.raises(
        SpecError, match=r"^fault 'cut:rank0@step3': cannot be injected on fake, which supports kill\. "
    ):
        run(fake, folder, probe=False, faults=["kill:rank1@step2", "cut:rank0@step3"])
    assert fake.made == [] and not folder.path.exists()


def test_a_fault_that_was_never_due_is_in_a_note_and_in_its_row(fake: FakeRuns, folder: RunFolder) -> None:
    summary = run(fake, folder, probe=False, faults=["kill:rank1@step5", "cut:rank0@3600s"])
    missed = ["kill:rank1@step5", "cut:rank0@3600s"]
    assert summary.status == "ok" and summary.notes[1:] == [f"fault {fault} was never due" for fault in missed]
    ((_, faults, *_, codes, recovered),) = fault_table([(folder, summary.spec, summary.status)])
    assert faults == " ".join(f"{fault} (not injected)" for fault in missed)
    assert (codes, recovered) == ("0 0", "-")


def test_a_resumed_run_says_after_which_step(fake: FakeRuns, folder: RunFolder) -> None:
    def play(where: RunFolder, rank: int) -> int:
        where.set_records_aside(rank)
        succeeds(where, rank)
        lines = where.records(rank).read_text().splitlines()
        marked = [line.replace('"attempt":null', '"attempt":1') for line in lines[:5]]  # the start, and four steps
        where.records(rank).write_text("\n".join([*marked, *lines[5:]]) + "\n")
        return 0

    fake.play = fails_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False)
    fake.play = play
    summary = resume(fake, folder)
    assert summary.status == "ok" and summary.notes[-1].startswith("resumed after step 4:")


# --- refused before anything exists ------------------------------------------------------------------------------


def test_a_folder_that_exists_is_refused_and_not_touched(fake: FakeRuns, folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.summary.write_text("precious")
    with pytest.raises(UsageError, match=r"exists.*--out"):
        run(fake, folder)
    assert [(path.name, path.read_text()) for path in folder.path.iterdir()] == [("summary.json", "precious")]
    assert fake.calls == ["enter", "exit"]


@pytest.mark.parametrize("key", ["subset", "test_subset"])
def test_more_images_than_there_are_is_refused_before_anything_exists(
    fake: FakeRuns, folder: RunFolder, key: str
) -> None:
    rule = rf"data\.{key} = 10000000: synthetic has \d+ (training|test) images\. Request fewer"
    with pytest.raises(SpecError, match=rule):
        run(fake, folder, data={"name": "synthetic", key: 10_000_000})
    assert not folder.path.exists() and fake.made == []


def test_the_summary_of_a_resumed_run_has_the_spec_of_its_folder(fake: FakeRuns, folder: RunFolder) -> None:
    """Its faults are not injected again, but stay in the spec: the report refuses a run whose two specs differ."""
    fake.play = fails_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False, faults=["kill:rank1@step2"], retries=0)
    before = folder.faults.read_text()
    fake.play = succeeds
    summary = resume(fake, folder, retries=1)
    assert summary.status == "ok"
    assert summary.spec == folder.read_spec()
    assert folder.faults.read_text() == before


def test_a_run_is_resumed_only_on_the_substrate_it_began_on(fake: FakeRuns, folder: RunFolder) -> None:
    fake.receipts, fake.play = iter([GOOD]), fails_with(1, "out of luck")
    with pytest.raises(TestbedError):
        run(fake, folder)
    with pytest.raises(SpecError, match=r"began on fake; .* the substrate it began on, not on other\. Use --on fake"):
        resume(fake, folder, other(fake))


def test_a_run_whose_controller_was_killed_is_resumed_only_on_its_substrate(fake: FakeRuns, folder: RunFolder) -> None:
    run(fake, folder, probe=False)
    folder.summary.unlink()  # as a killed controller leaves it
    assert recorded_substrate(folder) == "fake"
    with pytest.raises(SpecError, match=r"began on fake; .*Use --on fake"):
        resume(fake, folder, other(fake))
    assert resume(fake, folder).status == "ok"


def test_a_run_with_copies_is_not_resumed(fake: FakeRuns, folder: RunFolder) -> None:
    """Its spec has no CPU quota, so no copies would start, and the single node would have the whole machine."""
    fake.play = fails_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, mode="single")
    folder.copy(1).path.mkdir()
    made = len(fake.made)
    with pytest.raises(UsageError, match=r"--resume .*with copies on the idle nodes.* Start a new run\."):
        resume(fake, folder)
    assert len(fake.made) == made and Summary.read(folder).status == "failed"


def test_without_substrate_txt_the_summary_names_the_substrate(fake: FakeRuns, folder: RunFolder) -> None:
    run(fake, folder, probe=False)
    folder.substrate.unlink()
    assert recorded_substrate(folder) == "fake"
    folder.summary.unlink()
    assert recorded_substrate(folder) == ""
    assert resume(fake, folder, other(fake)).status == "ok"


def test_a_run_that_another_process_finished_while_we_waited_is_not_resumed(fake: FakeRuns, folder: RunFolder) -> None:
    fake.play = fails_with(3, "boom")
    with pytest.raises(RankFailed):
        run(fake, folder, probe=False)
    fake.play = succeeds
    lock = finishes_while_waiting(folder)
    with pytest.raises(UsageError, match=r"r: is finished, so there is nothing to resume"):
        resume_run(folder.read_spec(), fake.choice, folder, Silent(), 0, lock)
    assert Summary.read(folder).status == "ok"


# --- the probe ---------------------------------------------------------------------------------------------------


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


def test_a_failed_probe_quotes_the_error_of_the_node() -> None:
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


def test_a_failed_probe_uses_the_node_names_of_the_inventory(tmp_path: Path) -> None:
    logs = [tmp_path / "anna.log", tmp_path / "node0.log"]
    logs[0].write_text(json.dumps({"event": "error", "sentence": "node0: no connection from node1"}) + "\n")
    assert "failed: anna: no connection from node0; did not end on node0. Try" in _probe_error([1, None], logs)


def test_a_run_whose_network_is_left_unshaped_on_purpose_is_invalid_and_its_probe_is_not_repeated(
    fake: FakeRuns, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "SHAPING=egress: what arrives at a node is not shaped"
    monkeypatch.setattr(FakeSubstrate, "not_shaped", reason)
    fake.receipts = iter([BAD])
    summary = run(fake, folder)
    assert (summary.status, summary.reason) == ("invalid", reason)
    assert reason in summary.notes and summary.steps == 4
    alone = run(fake, RunFolder(folder.path.with_name("single")), mode="single")
    assert (alone.status, alone.reason) == ("ok", ""), "one node has no network"
