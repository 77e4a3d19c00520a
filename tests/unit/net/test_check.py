"""The check of the network before and after training: what makes a run invalid, and what is only a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.net.check import Recheck, measure, why_not_trained
from testbed.net.probe import Flow, Measurement, receipt_of
from testbed.net.shaping import Bucket, Shaping
from testbed.net.tcp import efficiency
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.errors import EngineLost, ProbeError, TestbedError
from testbed.spec.fabric import Fabric
from testbed.spec.run import RunSpec
from testbed.spec.words import Place, reading

MBIT = 10**6
RATES: list[int | None] = [200 * MBIT] * 2
BASE: dict[str, Any] = {"mode": "ring", "nodes": 2, "batch": 16}
SPEC = RunSpec.load(BASE, "test")


def receipt(first: int, second: int) -> Receipt:
    """Two links of 200mbit that carry so many Mbit/s on the wire."""
    sizes = [round(rate * MBIT * efficiency(1500) / 8) for rate in (first, second)]
    flows = [Flow(0, 1, sizes[0], 1.0), Flow(1, 0, sizes[1], 1.0)]
    return receipt_of(Measurement(flows, 1500, ["cubic"] * 2, 1.0), Fabric.of(RATES))


GOOD = receipt(200, 200)


# --- before training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "retry", "probes", "notes"),
    [([200, 200], True, 1, 0), ([150, 200], True, 2, 1), ([150, 160], True, 2, 1), ([150, 200], False, 1, 0)],
)
def test_an_invalid_receipt_is_measured_once_more(rates: list[int], retry: bool, probes: int, notes: int) -> None:
    receipts = [receipt(rate, rate) for rate in rates]
    waiting, said = iter(receipts), list[str]()
    check = measure(SPEC, lambda: next(waiting), said.append, retry=retry)
    assert check.receipt == receipts[probes - 1] and len(check.notes) == notes
    assert said[-1] == check.network == receipts[probes - 1].sentence() and len(said) == 1 + probes
    assert check.invalid is (rates[probes - 1] < 200)


def test_the_better_of_two_measurements_of_a_link_counts() -> None:
    """Two links that are off once each do not end a run."""
    waiting = iter([receipt(150, 200), receipt(200, 160)])
    check = measure(SPEC, lambda: next(waiting), lambda sentence: None)
    assert not check.invalid and check.receipt == GOOD and len(check.notes) == 1


@pytest.mark.parametrize(
    ("values", "network", "notes"),
    [({"mode": "single"}, "one node, no network", 0), ({"probe": False}, "not measured (probe = false)", 1)],
)
def test_without_links_or_without_a_probe_nothing_is_measured(values: dict[str, Any], network: str, notes: int) -> None:
    def fail() -> Receipt:
        raise AssertionError("probed")

    check = measure(RunSpec.load(BASE | values, "test"), fail, fail_to_announce)
    assert check.network == network and check.receipt is None and not check.invalid and len(check.notes) == notes


def fail_to_announce(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_run_that_ends_before_training_says_how_to_train_in_the_words_of_the_reader() -> None:
    assert why_not_trained(SPEC, "") == ""
    assert why_not_trained(SPEC.model_copy(update={"keep_going": True}), "too slow") == ""
    for place, words in ((Place.COMMAND_LINE, "use --keep-going to"), (Place.COMPOSE, "use KEEP_GOING=true to")):
        with reading(place):
            reason = why_not_trained(SPEC, "too slow")
        assert reason.startswith("too slow. Nothing was trained") and words in reason


# --- after training ----------------------------------------------------------------------------------------------


def shaped(rate: int = 200 * MBIT) -> Shaping:
    return Shaping(200 * MBIT, {device: Bucket(rate) for device in ("eth0", "ifb0")})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    GOOD.write(folder.receipt)
    for rank in range(2):
        folder.records(rank).touch()
    return folder


def recheck(folder: RunFolder, *later: Shaping | TestbedError) -> Recheck:
    """Two nodes that are shaped as requested before training, and so after it, or as in `later`."""
    first = {0: shaped(), 1: shaped()}
    turns = iter([first, *([first] if not later else [])])

    def read_shaping() -> dict[int, Shaping]:
        found = next(turns, None)
        if found is not None:
            return found
        for each in later:
            if isinstance(each, TestbedError):
                raise each
        return {rank: each for rank, each in enumerate(later) if isinstance(each, Shaping)}

    return Recheck(folder, read_shaping)


class Probes:
    """A probe with these outcomes, one after the other."""

    def __init__(self, *outcomes: Receipt | TestbedError) -> None:
        self.left = list(outcomes)

    def __call__(self) -> Receipt:
        outcome = self.left.pop(0)
        if isinstance(outcome, TestbedError):
            raise outcome
        return outcome


FAILED = ProbeError("node1 receives nothing")
SAMPLES: dict[str, tuple[list[Receipt | TestbedError], str, str]] = {
    "as requested": ([GOOD], "", ""),
    "off once": ([receipt(150, 200), GOOD], "", ""),
    "each link off once": ([receipt(150, 200), receipt(200, 160)], "", ""),
    "failed once": ([FAILED, GOOD], "", ""),
    "failed twice": ([FAILED, FAILED], "", "after training: node1 receives nothing"),
    "too slow twice": ([receipt(150, 200), receipt(160, 200)], "", "-20.0 % on node0 -> node1"),
    "too slow, then failed": ([receipt(150, 200), FAILED], "", "-25.0 % on node0 -> node1"),
    "too fast once": ([receipt(300, 200), GOOD], "", ""),
    "too fast twice": ([receipt(300, 200), receipt(400, 200)], "+50.0 % on node0 -> node1", "+50.0 %"),
    "one too fast, one slower": ([receipt(250, 120)] * 2, "+25.0 % on node0 -> node1", "-40.0 %"),
}


@pytest.mark.parametrize(("outcomes", "invalid", "note"), SAMPLES.values(), ids=SAMPLES.keys())
def test_where_buckets_and_counters_agree_only_a_link_that_is_too_fast_makes_a_run_invalid(
    folder: RunFolder, outcomes: list[Receipt | TestbedError], invalid: str, note: str
) -> None:
    probe = Probes(*outcomes)
    found = recheck(folder).after(probe, lambda sentence: None)
    assert probe.left == []
    assert invalid in found.invalid and bool(found.invalid) is bool(invalid)
    assert note in "".join(found.notes) and len(found.notes) == bool(note)


def test_the_sample_is_added_to_the_receipt_by_one_node_only(folder: RunFolder) -> None:
    recheck(folder).after(Probes(GOOD), fail_to_announce, receipt=False)
    assert Receipt.read(folder.receipt).after is None
    recheck(folder).after(Probes(GOOD), fail_to_announce)
    assert Receipt.read(folder.receipt).after == GOOD


def test_a_changed_bucket_is_the_reason_and_nothing_is_probed(folder: RunFolder) -> None:
    found = recheck(folder, shaped(), shaped(rate=10**9)).after(Probes(), fail_to_announce)
    assert found.invalid.startswith("after training: node1: egress is not shaped as requested: requested 200mbit")


def test_the_reason_of_another_node_is_that_of_all(folder: RunFolder) -> None:
    found = recheck(folder).after(Probes(), fail_to_announce, agree=lambda key, reason: reason or f"{key} of node7")
    assert found.invalid == "after training: shaping of node7"


def test_shaping_that_cannot_be_read_is_a_reason_and_a_lost_engine_is_not(folder: RunFolder) -> None:
    found = recheck(folder, TestbedError("tc failed")).after(Probes(), fail_to_announce)
    assert found.invalid == "after training: the network could not be checked: tc failed"
    with pytest.raises(EngineLost):
        recheck(folder, EngineLost("gone")).after(Probes(), fail_to_announce)
    with pytest.raises(EngineLost):
        recheck(folder).after(Probes(EngineLost("gone")), fail_to_announce)


def test_without_nodes_to_compare_nothing_differs(folder: RunFolder) -> None:
    check = Recheck(folder, dict)
    assert not check.shaped and check.before() == "" and check.after(None, fail_to_announce).invalid == ""
