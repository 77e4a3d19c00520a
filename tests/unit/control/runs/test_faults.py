"""Faults are injected when they are due, reverted, refused where a substrate cannot inject them, and recorded."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.control.runs.faults import Injector
from testbed.control.runs.select import SubstrateChoice, check_faults, choose
from testbed.control.runs.supervisor import RankState, Tail
from testbed.control.substrates.fake import FakeProcess, FakeSubstrate
from testbed.spec.errors import CommandFailed, SpecError
from testbed.spec.fault import Fault
from testbed.spec.run import RunSpec


def injector(tmp_path: Path, *faults: str) -> tuple[Injector, FakeSubstrate, list[RankState]]:
    substrate = FakeSubstrate(3)
    made = Injector([Fault.parse(text) for text in faults], substrate, tmp_path / "faults.jsonl")
    processes = [FakeProcess(pid=k) for k in range(3)]
    made.attach(processes)
    return made, substrate, [RankState(process, Tail(tmp_path / "none"), started=0.0) for process in processes]


def events(tmp_path: Path) -> list[tuple[str, str]]:
    lines = (tmp_path / "faults.jsonl").read_text().splitlines()
    return [(event["event"], event.get("fault", "")) for event in map(json.loads, lines)]


def test_a_fault_happens_once_when_its_rank_has_done_so_many_steps(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "kill:rank2@step10")
    ranks[2].last_step, ranks[0].last_step = 8, 50
    made.poll(ranks)
    assert substrate.calls == []
    ranks[2].last_step = 9
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == [("kill", 2)]
    assert events(tmp_path) == [("injected", "kill:rank2@step10")]


def test_a_rank_that_has_not_started_gets_no_fault(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "cut:rank1@1us")
    ranks[1].started = None
    made.poll(ranks)
    assert substrate.calls == []


@pytest.mark.parametrize(
    ("fault", "does", "undoes"),
    [
        ("pause:rank1@step0+1us", ("pause", 1), ("resume", 1)),
        ("cut:rank1@step0+1us", ("cut", 1), ("reconnect", 1)),
        ("rate:rank1@step0+1us=50mbit", ("set_rate", 1, 50_000_000), ("set_rate", 1, None)),
        ("slow:rank1@step0+1us=0.25cpu", ("set_cpus", 1, 0.25), ("set_cpus", 1, None)),
    ],
)
def test_a_fault_with_a_duration_is_reverted(tmp_path: Path, fault: str, does: object, undoes: object) -> None:
    made, substrate, ranks = injector(tmp_path, fault)
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == [does, undoes]
    assert events(tmp_path) == [("injected", fault), ("over", fault)]


def test_a_fault_without_an_end_is_reverted_before_the_next_attempt(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "cut:rank0@step0")
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == [("cut", 0)]
    made.revert_all()
    assert substrate.calls == [("cut", 0), ("reconnect", 0)]
    assert json.loads((tmp_path / "faults.jsonl").read_text().splitlines()[-1])["event"] == "again"


def test_a_memory_limit_is_removed_before_the_next_attempt(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "oom:rank1@step0")
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == [("limit_memory", 1)]
    made.revert_all()
    made.revert_all()
    assert substrate.calls == [("limit_memory", 1), ("unlimit_memory", 1)]
    assert ("over", "oom:rank1@step0") in events(tmp_path)


def test_other_faults_of_a_paused_node_wait_until_it_is_resumed(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "pause:rank1@step0", "kill:rank1@step0", "kill:rank2@step0")
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == [("pause", 1), ("kill", 2)]
    assert [str(fault) for fault in made.waiting] == ["kill:rank1@step0"]
    made.revert_all()
    made.poll(ranks)
    assert substrate.calls[2:] == [("resume", 1), ("kill", 1)]


@pytest.mark.parametrize(
    ("short", "long", "calls", "undoes"),
    [
        ("pause:rank1@step0+1us", "pause:rank1@step0", [("pause", 1)], ("resume", 1)),
        ("cut:rank1@step0+1us", "cut:rank1@step0", [("cut", 1), ("cut", 1)], ("reconnect", 1)),
        (
            "rate:rank1@step0+1us=50mbit",
            "rate:rank1@step0=20mbit",
            [("set_rate", 1, 50_000_000), ("set_rate", 1, 20_000_000), ("set_rate", 1, 20_000_000)],
            ("set_rate", 1, None),
        ),
    ],
)
def test_the_end_of_one_fault_does_not_end_another_of_its_kind(
    tmp_path: Path, short: str, long: str, calls: list[object], undoes: object
) -> None:
    made, substrate, ranks = injector(tmp_path, short, long)
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.calls == calls
    assert events(tmp_path) == [("injected", short), ("injected", long), ("over", short)]
    made.revert_all()
    assert substrate.calls[len(calls) :] == [undoes]


def test_a_fault_whose_rank_ends_at_the_same_moment_waits_for_the_next_attempt(tmp_path: Path) -> None:
    made, _, ranks = injector(tmp_path, "disk-full:rank2@step0")

    def ended() -> None:
        ranks[2].process.code = 6  # type: ignore[attr-defined]
        raise CommandFailed("no such process", 1, "")

    ranks[2].process.forbid_writing = ended  # type: ignore[method-assign]
    made.poll(ranks)
    assert [str(fault) for fault in made.waiting] == ["disk-full:rank2@step0"]
    assert not (tmp_path / "faults.jsonl").exists()


def test_exit_oom_and_disk_full_act_on_the_rank(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "exit:rank0@step0", "oom:rank1@step0", "disk-full:rank2@step0")
    made.poll(ranks)
    signals = [state.process.signals for state in ranks]  # type: ignore[attr-defined]
    assert signals == [[signal.SIGTERM], [signal.SIGUSR1], [0]]
    assert substrate.calls == [("limit_memory", 1)]


def test_the_error_and_the_exit_code_of_each_rank_are_written_once(tmp_path: Path) -> None:
    made, _, ranks = injector(tmp_path, "kill:rank1@step999")
    ranks[0].code, ranks[0].ended = 6, 5.0
    ranks[0].error = {"kind": "error", "failed_rank": 1, "at": 4.5, "message": "rank 1 is gone"}
    made.poll(ranks)
    made.poll(ranks)
    saw, ended = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert (saw["event"], saw["rank"], saw["failed_rank"], saw["at"]) == ("saw", 0, 1, 4.5)
    assert (ended["event"], ended["code"], ended["at"]) == ("ended", 6, 5.0)


def test_a_time_on_the_clock_of_another_machine_is_not_written(tmp_path: Path) -> None:
    made, substrate, ranks = injector(tmp_path, "kill:rank1@step999")
    substrate.one_clock = False
    ranks[0].code, ranks[0].ended = 6, 5.0
    ranks[0].error = {"kind": "error", "failed_rank": 1, "at": 987654.0, "message": "rank 1 is gone"}
    made.poll(ranks)
    saw, _ = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert saw["at"] == 5.0


def test_a_history_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    made, _, ranks = injector(tmp_path, "kill:rank1@step999")
    (tmp_path / "faults.jsonl").symlink_to(tmp_path / "victim")
    ranks[0].code, ranks[0].ended = 6, 5.0
    made.poll(ranks)
    assert not (tmp_path / "victim").exists()


def test_a_run_without_faults_has_no_history(tmp_path: Path) -> None:
    made, _, ranks = injector(tmp_path)
    ranks[0].code = 0
    made.poll(ranks)
    assert not (tmp_path / "faults.jsonl").exists()


def test_a_history_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    """It is written last, while the error that ended the run is being raised."""
    made, substrate, ranks = injector(tmp_path / "vanished", "kill:rank1@step0")
    ranks[0].code, ranks[0].ended = 3, 5.0
    made.poll(ranks)
    made.revert_all()
    assert substrate.calls == [("kill", 1)] and made.waiting == ()


def test_faults_that_are_not_due_yet_are_listed(tmp_path: Path) -> None:
    made, _, ranks = injector(tmp_path, "kill:rank2@step10", "kill:rank1@step99")
    ranks[2].last_step = 9
    made.poll(ranks)
    assert [str(fault) for fault in made.waiting] == ["kill:rank1@step99"]


@pytest.mark.parametrize("kind", ["cut", "rate", "slow", "oom"])
def test_plain_processes_refuse_faults_that_they_cannot_inject(kind: str) -> None:
    value = {"rate": "=1mbit", "slow": "=0.5cpu"}.get(kind, "")
    spec = RunSpec.load({"nodes": 2, "faults": [f"{kind}:rank0@step1{value}"]}, "test")
    with pytest.raises(
        SpecError, match=rf"{kind}.*cannot be injected on process.*disk-full\. Leave it out.*--on netns"
    ):
        check_faults(spec, choose("process", spec))


@pytest.mark.parametrize("fault", ["kill:rank0@step1", "exit:rank0@step1", "pause:rank0@5s", "disk-full:rank0@step1"])
def test_plain_processes_accept_faults_that_they_can_inject(fault: str) -> None:
    spec = RunSpec.load({"nodes": 2, "faults": [fault]}, "test")
    check_faults(spec, choose("process", spec))


@pytest.mark.parametrize(("fault", "controller"), [("slow:rank0@step1=0.5cpu", "cpu"), ("oom:rank0@step1", "memory")])
def test_a_fault_is_refused_where_the_controller_of_cgroups_that_it_needs_cannot_be_used(
    fault: str, controller: str
) -> None:
    spec = RunSpec.load({"nodes": 2, "faults": [fault]}, "test")
    lacking = replace(choose("netns", spec).type, lacks=lambda name: f"{name} is not writable")
    with pytest.raises(SpecError, match=f"needs the {controller} controller of cgroups: {controller} is not writable"):
        check_faults(spec, SubstrateChoice(lacking, ""))
    check_faults(spec, SubstrateChoice(replace(lacking, lacks=lambda name: ""), ""))
