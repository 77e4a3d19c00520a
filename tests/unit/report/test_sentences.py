"""Every registered rule, fed with runs that carry no claim: it says nothing that these runs do not show.

A new rule is tested here as soon as it is registered, and a rule that no scenario makes speak fails the last test.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testbed.report import findings
from testbed.report.figures.style import canvas, plot
from testbed.report.findings import Verdict
from testbed.report.load import load
from testbed.report.model import chapters, names
from testbed.report.page import Section, make_faults, make_section
from testbed.report.sentences import COMPARE_STEPS, RULES, Sentence, check_sentence, states
from tests.support.synthetic import Conditions, make_faulted, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}, "experiment": "adhoc"}
MODES = ("single", "none", "gather", "ring", "ddp")
RATE = "rate:rank2@step3=1mbit"
PUBLISHED = {
    "speed_up": {"ring": 1.0},
    "shape": [{"says": "so it is", "measure": "speed_up", "rising": ["gather", "ddp"]}],
}
COMPARISON = r"faste|slowe|times as|best|gains|costs|agree within|beats|no difference"
SPREAD = r"steady|vary|nine of ten|95 %"
TREND = r"\bfalls\b|\breach|\brises\b"
CAUSE = r"limit |limits |Straggler|slow to compute|slow link"


def modes(folder: Path, *chosen: str, made: Callable[[str], Conditions] | None = None, **values: Any) -> None:
    for mode in chosen:
        conditions = made(mode) if made else Conditions(compute=1.6)
        make_run(folder / re.sub("[/:]", "_", mode), conditions, mode=mode, **LINK | values)


def publish(folder: Path) -> None:
    (folder / "experiment.json").write_text(json.dumps({"name": "adhoc", "title": "t", "published": PUBLISHED}))


def one_step(folder: Path) -> None:
    modes(folder, *MODES, steps=3)
    publish(folder)


def one_step_each_way(folder: Path) -> None:
    """One step at two rates, of two numbers of nodes, with two bucket sizes, with every:2 and every:3."""
    for nodes in (2, 4):
        make_run(folder / f"n{nodes}", mode="ring", nodes=nodes, **LINK | {"steps": 3, "experiment": "nodes"})
    for rate in ("100mbit", "500mbit"):
        make_run(folder / rate, mode="ring", steps=3, **LINK | {"link": {"rate": rate}, "experiment": "rates"})
    for mode in ("ddp/bucket:1MiB", "ddp/bucket:25MiB", "ring/every:2", "ring/every:3"):
        make_run(folder / re.sub("[/:]", "_", mode), mode=mode, steps=3, **LINK | {"experiment": "words"})
    for substrate in ("netns", "compose"):
        values = LINK | {"steps": 3, "experiment": "places"}
        make_run(folder / substrate, Conditions(substrate=substrate), mode="ring", **values)


def one_mode(folder: Path) -> None:
    modes(folder, "ring")


def rising_loss(folder: Path) -> None:
    modes(folder, *MODES, made=lambda mode: Conditions(compute=1.6, loss_rate=-0.1))


def rising_loss_of_one_mode(folder: Path) -> None:
    modes(folder, "ring", made=lambda mode: Conditions(compute=1.6, loss_rate=-0.1))


def equal_values(folder: Path) -> None:
    """Three modes that send nothing to speak of and compute for the same time."""
    values = {"link": {"rate": "100gbit"}}
    modes(folder, "allreduce", "ring", "halving", made=lambda mode: Conditions(compute=40.0, noise=0.0), **values)


def invalid_runs(folder: Path) -> None:
    modes(folder, "gather", "ring", "ddp")
    for mode in ("tree", "server"):
        make_run(folder / mode, Conditions(compute=0.01), "invalid", "a link is off by 30 %", mode=mode, **LINK)


def faulted_runs(folder: Path) -> None:
    """`tree` has no step outside the fault; it would be the fastest."""
    modes(folder, "gather", "ring", "ddp")
    make_faulted(folder / "tree", RATE, None, Conditions(compute=0.01), True, mode="tree", **LINK | {"warmup": 3})


def two_substrates(folder: Path) -> None:
    for substrate, compute in (("netns", 1.6), ("compose", 2.4)):
        for mode in ("gather", "ring", "ddp"):
            conditions = Conditions(compute=compute, substrate=substrate)
            make_run(folder / f"{mode}-{substrate}", conditions, mode=mode, **LINK)


def other_modes_elsewhere(folder: Path) -> None:
    """The modes on compose are others than those on netns, so that a mode alone names a run."""
    modes(folder, "gather", "ring", made=lambda mode: Conditions(compute=1.6, substrate="netns"))
    modes(folder, "ddp", "tree", made=lambda mode: Conditions(compute=0.2, substrate="compose"))


def two_machines(folder: Path) -> None:
    for cpu, compute in (("Xeon", 1.6), ("Epyc", 0.4)):
        for mode in ("gather", "ring"):
            make_run(folder / f"{mode}-{cpu}", Conditions(compute=compute, cpu_model=cpu), mode=mode, **LINK)


def two_rates(folder: Path) -> None:
    for rate in ("100mbit", "500mbit"):
        for mode in ("gather", "ring"):
            make_run(folder / f"{mode}-{rate}", mode=mode, **LINK | {"link": {"rate": rate}})


def faster_than_its_bound(folder: Path) -> None:
    """Runs of a version that did not yet refuse them."""
    modes(folder, "gather", "ring", made=lambda mode: Conditions(compute=0.01, overhead=0.1))
    for path in folder.glob("*/summary.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "ok", "reason": ""}))


def more_bytes_than_theory(folder: Path) -> None:
    modes(folder, "ring")
    path = folder / "ring" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"sent_per_step": [1.12 * each for each in summary["sent_per_step"]]}))


def far_from_the_bound(folder: Path) -> None:
    """Two runs of one mode that only spans tell apart: both have the same name."""
    for name, spans in (("a", True), ("b", False)):
        make_run(folder / name, Conditions(overhead=188.0, noise=0.0), mode="ring", spans=spans, **LINK)


def rich(folder: Path) -> None:
    """Runs that carry every claim there is."""
    modes(folder, *MODES, "ring/every:2", "ring/every:6", "ddp/bucket:1MiB", "ddp/bucket:25MiB", steps=26)
    publish(folder)
    slow = {"node2": {"cpus": 0.1}}
    for name, overrides in (("slow", slow), ("equal", {})):
        conditions = Conditions(compute=2.0, slow_cpu={2: 3.0} if overrides else {})
        make_run(folder / name, conditions, mode="ring", overrides=overrides, **LINK | {"experiment": "straggler"})
    for placement in ("before-step", "after-step"):
        for mode in ("ring", "allreduce"):
            values = LINK | {"experiment": "placement", "placement": placement}
            conditions = Conditions(loss_rate=0.05 if placement == "before-step" else 0.01)
            make_run(folder / f"{mode}-{placement}", conditions, mode=mode, **values)
    for mode in ("gather", "ddp"):
        for nodes in (2, 4):
            values = LINK | {"experiment": "nodes", "nodes": nodes, "batch": 48}
            make_run(folder / f"{mode}-n{nodes}", Conditions(compute=3.6), mode=mode, **values)
            weak = {"batch": None, "batch_per_rank": 16, "experiment": "weak", "nodes": nodes}
            make_run(folder / f"{mode}-w{nodes}", mode=mode, **LINK | weak)
        for rate in ("10mbit", "1gbit"):
            make_run(folder / f"{mode}-{rate}", mode=mode, **LINK | {"experiment": "rates", "link": {"rate": rate}})
    make_run(folder / "one-n", Conditions(compute=3.6), mode="single", **LINK | {"experiment": "nodes", "batch": 48})
    make_run(folder / "hosts", Conditions(offsets=[0.0, 0.1, 0.2, 0.3]), mode="ring", **LINK | {"experiment": "hosts"})
    far = {"link": {"rate": "200mbit", "delay": "20ms"}, "experiment": "far"}
    make_run(folder / "far", Conditions(overhead=300.0), mode="ring", **LINK | far)
    for number in (1, 2):
        make_faulted(folder / f"killed{number}", "kill:rank2@step8", mode="ring", **LINK)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        *(one_step, one_step_each_way, one_mode, rising_loss, rising_loss_of_one_mode, equal_values, invalid_runs),
        *(faulted_runs, two_substrates, other_modes_elsewhere, two_machines, two_rates, faster_than_its_bound),
        *(more_bytes_than_theory, far_from_the_bound, rich),
    )
}
# What no sentence of a scenario may say, and what only some rules may say.
NEVER: dict[str, str] = {
    "one_step": f"{COMPARISON}|{SPREAD}|{TREND}|{CAUSE}|^Control",
    "one_step_each_way": f"{COMPARISON}|{SPREAD}|{TREND}|{CAUSE}",
    "one_mode": r"fastest|slowest|[Ee]very mode|[Aa]ll \d|all modes|\bothers\b|most:",
    "rising_loss": r"\bfalls\b|\breach",
    "rising_loss_of_one_mode": r"\bfalls\b|\breach",
    "equal_values": r"is [\d.]+ times|fastest|slow(er|est)|times as|vary most|is best",
    "invalid_runs": r"\btree\b|\bserver\b",
    "faulted_runs": r"\btree\b",
    "faster_than_its_bound": r"within [\d.]+ % of its lower bound|perfect overlap",
    "more_bytes_than_theory": r"what theory predicts",
}
MAY = {"faulted_runs": ("findings.faults", "findings.one_fault", "findings.faults_noticed")}


@dataclass
class Said:
    """What the report of one scenario says: the sentences, and the names that they may use for runs."""

    sections: list[Section]
    sentences: list[Sentence]
    names: dict[str, list[str]] = field(default_factory=dict)  # label of a mode -> full names


@functools.cache
def said(scenario: str) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        SCENARIOS[scenario](Path(folder))
        loaded = load([Path(folder)])
    sections = [make_section(chapter) for chapter in chapters(loaded)]
    found: dict[str, list[str]] = {}
    for part in sections:
        cells = part.chapter.cells
        for cell, name in zip(cells, names(cells), strict=True):
            found.setdefault(cell.label, []).append(name)
    faults = make_faults(loaded)
    texts = [text for part in sections for text in every_text(part)]
    texts += [faults.finding, *(drawn.finding for drawn in faults.plots)] if faults else []
    return Said(sections, [check_sentence(text) for text in texts], found)


def every_text(part: Section) -> Iterator[str]:
    """Everything in a section that is derived from numbers."""
    verdict = part.verdict
    yield from (verdict.headline, *verdict.why)
    yield from (tile.text for tile in verdict.tiles)
    yield from (check.text for check in verdict.checks)
    yield from (drawn.finding for drawn in part.plots)
    yield from (claim.text for claim in part.published.sentences) if part.published else ()


def clauses(text: str) -> list[str]:
    return re.split(r"\. |; ", text)


def mentions(text: str, name: str) -> int:
    """How often a text names a run; `ring` is not in `ring/bucket:2MiB`."""
    return len(re.findall(rf"(?<![\w/:|]){re.escape(name)}(?![\w/:])", text))


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rule_says_nothing_that_its_runs_do_not_show(scenario: str, rule: str) -> None:
    everything = said(scenario)
    own = [sentence for sentence in everything.sentences if sentence.rule == rule]
    for sentence in own:
        assert not re.search(r"\bnan\b|\binf\b|\bNone\b|-\d|\b1\.00? times|\b0\.0 times", sentence), sentence
        never = NEVER.get(scenario)
        if never and sentence.claims and rule not in MAY.get(scenario, ()):
            assert not re.search(never, sentence), sentence
        for faster in re.findall(r"([\d.]+) times as fast as", sentence):
            assert float(faster) > 1, sentence
        for clause in clauses(sentence):
            found = Counter(names_in(clause, everything))
            assert max(found.values(), default=0) <= 1, sentence


def names_in(clause: str, everything: Said) -> list[str]:
    """The full names of runs in a clause, of names that begin alike the longest: `ring, 4 nodes` is not `ring`."""
    known = sorted({name for each in everything.names.values() for name in each}, key=len, reverse=True)
    return re.findall(rf"(?<![\w/:|])(?:{'|'.join(map(re.escape, known))})(?![\w/:])", clause)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(
    ("scenario", "places"),
    [
        ("two_substrates", ("netns", "compose")),
        ("other_modes_elsewhere", ("netns", "compose")),
        ("two_machines", ("Xeon", "Epyc")),
        ("two_rates", ("100", "500")),
    ],
)
def test_a_sentence_that_names_two_runs_says_where_each_was_measured(
    scenario: str, places: tuple[str, str], rule: str
) -> None:
    """Either one place is named for both, as in the headline, or every run has its own."""
    everything = said(scenario)
    for sentence in (each for each in everything.sentences if each.rule == rule):
        for clause in clauses(sentence):
            labels = sum(mentions(clause, label) for label in everything.names)
            named = sum(clause.count(place) for place in places)
            if labels > 1 and rule not in WITHIN_ONE_CONDITION:
                assert named == 1 or named >= labels, sentence


# Rules that `verdict` calls with cells of the condition that the headline names.
WITHIN_ONE_CONDITION = {"findings.busiest_link", "findings.limit", "findings.hidden_time"}


def test_the_headline_compares_runs_of_one_place_and_names_it() -> None:
    part = said("other_modes_elsewhere").sections[0]
    headline = part.verdict.headline
    (place,) = [each for each in ("netns", "compose") if each in headline]
    own = {cell.label for cell in part.chapter.cells if cell.substrate == place}
    others = {cell.label for cell in part.chapter.cells if cell.substrate != place}
    assert all(mentions(headline, label) for label in own) and not any(mentions(headline, label) for label in others)
    assert "on netns and compose;" in part.caption or "on compose and netns;" in part.caption


def test_one_step_has_a_headline_that_says_so() -> None:
    headline = said("one_step").sections[0].verdict.headline
    assert f"1 step after warm-up is too few to compare, {COMPARE_STEPS} are needed" in headline


def test_a_rising_loss_is_said_to_rise() -> None:
    found = {each.rule: each for each in said("rising_loss_of_one_mode").sentences}
    assert "rises from 2.3" in found["findings.loss_by_time"] and "rises from 2.3" in found["findings.loss_by_step"]


def test_communication_below_its_bound_is_named_without_a_cause() -> None:
    found = {each.rule: each for each in said("faster_than_its_bound").sentences}
    assert (
        "times its lower bound, in which rounds follow each other at the rate of the probe"
        in found["findings.roofline"]
    )


def test_bytes_beyond_headers_and_acknowledgements_are_no_theory() -> None:
    (check,) = [c for c in said("more_bytes_than_theory").sections[0].verdict.checks if c.text.startswith("Bytes")]
    assert check.ok is False and re.search(r"1\d % more bytes than theory predicts for ring", check.text)


def test_every_rule_speaks_of_some_runs() -> None:
    """Else no test here would notice what it says. Add a scenario, or runs to `rich`, for a new rule."""
    spoken = {each.rule for scenario in SCENARIOS for each in said(scenario).sentences if each.claims}
    assert set(RULES) - spoken == set()


def test_text_that_no_registered_rule_made_is_refused() -> None:
    with pytest.raises(TypeError, match="no registered rule"):
        plot(canvas(), "a", "the loss falls")
    with pytest.raises(TypeError, match="no registered rule"):
        Verdict("ring is fastest", [], [], [])


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"findings\.limit is registered twice"):
        states(steps=1)(findings.limit)
