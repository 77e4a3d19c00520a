"""Nodes stay up between runs of a sweep that need equal ones, and their receipt is used again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.control.runs import nodes
from testbed.control.runs.progress import Silent
from testbed.control.runs.select import SubstrateChoice
from testbed.control.runs.sweep import run_all
from testbed.control.substrates.fake import FakeSubstrate
from testbed.net.shaping import Bucket, Shaping
from testbed.results.conclude import Summary
from testbed.results.receipt import Receipt
from testbed.spec.errors import NetworkInvalid
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import BAD, GOOD, RATE, FakeRuns

BASE = {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": 6, "experiment": "kept"}


def run(fake: FakeRuns, *modes: str, **more: object) -> list[Summary]:
    return run_specs(fake, specs_of(*modes, **more))


def specs_of(*modes: str, **more: object) -> list[RunSpec]:
    base = BASE | {"link": {"rate": "200mbit"}} | more
    return [RunSpec.load(base | {"mode": mode, "name": f"{k}-{mode}"}, "test") for k, mode in enumerate(modes)]


def run_specs(fake: FakeRuns, specs: list[RunSpec]) -> list[Summary]:
    choice = SubstrateChoice(replace(fake.type, keeps_nodes=lambda spec: True), "for tests")
    return run_all(specs, choice, Path("runs"), Silent())[0]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    monkeypatch.chdir(tmp_path)
    made = FakeRuns()
    made.receipts = itertools.repeat(GOOD)
    return made


def receipts(summaries: Sequence[Summary]) -> list[Receipt]:
    return [Receipt.read(Path("runs/kept") / each.spec.name / "receipt.json") for each in summaries]


def entered(fake: FakeRuns) -> list[int]:
    """How often each substrate was entered and left."""
    return [sum(call[0] in ("enter", "exit") for call in each.calls) for each in fake.made]


def test_equal_runs_share_nodes_and_the_receipt_says_when_it_was_measured(fake: FakeRuns) -> None:
    found = run(fake, "ring", "tree")
    first, second = receipts(found)
    assert entered(fake) == [2] and first.measured_before is None and second.measured_before is not None
    assert second.links == first.links and "s before this run, on the same nodes" in found[1].network
    assert "before this run" not in found[0].network


def test_other_nodes_are_made_for_another_number_of_ranks(fake: FakeRuns) -> None:
    run(fake, "ring", "single", "ring")
    assert entered(fake) == [2, 2, 2]


def test_other_nodes_are_made_for_runs_in_another_folder(fake: FakeRuns) -> None:
    """Containers see only the folder that the first run's folder is in."""
    run_specs(fake, [*specs_of("ring"), *specs_of("ring", experiment="other")])
    assert entered(fake) == [2, 2]


def test_after_ten_minutes_the_network_is_measured_again(fake: FakeRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "REUSE_S", -1.0)
    found = run(fake, "ring", "tree")
    assert entered(fake) == [2] and [each.measured_before for each in receipts(found)] == [None, None]


@pytest.mark.parametrize("sample", [BAD, NetworkInvalid])
def test_after_a_link_that_was_too_slow_or_could_not_be_measured_the_network_is_measured_again(
    fake: FakeRuns, sample: Receipt | type[NetworkInvalid]
) -> None:
    fake.samples = itertools.repeat(sample)
    link = Shaping(RATE, {device: Bucket(RATE) for device in ("eth0", "ifb0")})
    before, after = [link] * 2, [Shaping(RATE, {name: Bucket(RATE, 10**6) for name in link.buckets})] * 2
    fake.shapings = itertools.cycle(before + after)
    found = run(fake, "ring", "tree")
    assert entered(fake) == [2] and [each.status for each in found] == ["ok", "ok"]
    assert "after training" in found[0].notes[0]
    assert [each.measured_before for each in receipts(found)] == [None, None]


def test_nodes_are_not_kept_after_a_fault_or_an_invalid_run(fake: FakeRuns) -> None:
    run(fake, "ring", "tree", faults=["pause:rank0@step5+1s"])
    assert entered(fake) == [2, 2]
    fake.receipts = itertools.repeat(BAD)
    assert {each.status for each in run(fake, "gather", "allreduce")} == {"invalid"}
    assert entered(fake)[2:] == [2, 2]


def test_nodes_that_are_bound_to_a_run_are_not_kept(fake: FakeRuns) -> None:
    specs = [RunSpec.load(BASE | {"mode": mode, "name": mode}, "test") for mode in ("ring", "tree")]
    run_all(specs, fake.choice, Path("runs"), Silent())
    assert entered(fake) == [2, 2]


def test_nodes_with_a_process_that_cannot_be_ended_are_not_kept(
    fake: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(substrate: FakeSubstrate) -> None:
        raise TimeoutError("pid 7 has not ended")

    choice = SubstrateChoice(replace(fake.type, keeps_nodes=lambda spec: True), "for tests")
    (spec,) = specs_of("ring")
    with nodes.NodesOfRuns() as kept:
        monkeypatch.setattr(FakeSubstrate, "stop", stop)
        with pytest.raises(TimeoutError), kept.of(choice, spec, Path("runs/kept/0-ring")):
            pass
        assert entered(fake) == [2]
