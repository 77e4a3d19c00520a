"""Faults: one spelling that parses and prints back, refusals with a reason, and a schedule drawn from the seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.experiment import spec_from_flags
from testbed.spec.fault import KINDS, LASTING, Fault, draw_random
from testbed.spec.run import RunSpec

NUMBERS = st.one_of(st.just("?"), st.integers(0, 9999).map(str))
DURATIONS = st.integers(1, 10**6).map(lambda ms: f"{ms}ms")


@st.composite
def spelled(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(KINDS))
    when = draw(st.one_of(NUMBERS.map("step{}".format), DURATIONS))
    lasts = f"+{draw(DURATIONS)}" if kind in LASTING and draw(st.booleans()) else ""
    value = {"rate": f"={draw(st.integers(1, 10**6))}kbit", "slow": f"={draw(st.integers(1, 1024))}cpu"}.get(kind, "")
    return f"{kind}:rank{draw(NUMBERS)}@{when}{lasts}{value}"


@given(spelled())
def test_every_fault_parses_and_its_print_parses_to_the_same(text: str) -> None:
    fault = Fault.parse(text)
    assert Fault.parse(str(fault)) == fault


@given(st.text(max_size=60))
def test_any_text_is_a_fault_or_refused_with_it(text: str) -> None:
    try:
        assert Fault.parse(text).kind in KINDS
    except SpecError as error:
        assert str(error).startswith(("fault ", "duration ", "rate ")) and str(error).endswith(".")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode:rank1@step2", "unknown kind 'explode'"),
        ("kill:rank1@step2+3s", "cannot be undone"),
        ("kill:rank1@step2=3", "takes no value"),
        ("rate:rank1@step2", "needs a value"),
        ("slow:rank1@step2=0.001cpu", "0.01cpu to 1024cpu"),
        ("rate:rank1@step2=fast", "200mbit"),
        ("kill:1@2", "kind:rankR@WHEN"),
    ],
)
def test_a_refusal_says_why(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=r"Write|Known|Leave") as refusal:
        Fault.parse(text)
    assert words in str(refusal.value)


def test_a_rank_or_step_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'kill:rank4@step1': there are ranks 0 to 3"):
        RunSpec.load({"faults": ["kill:rank4@step1"]}, "")
    with pytest.raises(SpecError, match=r"'kill:rank0@step40': the run ends after step 40"):
        RunSpec.load({"faults": ["kill:rank0@step40"]}, "")
    with pytest.raises(SpecError, match="there are ranks 0 to 0"):
        RunSpec.load({"mode": "single", "faults": ["kill:rank1@step1"]}, "")


def test_what_is_drawn_follows_from_the_seed_and_lies_within_the_run() -> None:
    faults = [Fault.parse("kill:rank?@step?")] * 50
    first, again, other = (draw_random(faults, seed, world=4, steps=20) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.rank for fault in first} == {0, 1, 2, 3}
    assert all(fault.step is not None and 1 <= fault.step < 20 for fault in first)


def test_what_is_given_is_not_drawn() -> None:
    (fault,) = RunSpec.load({"faults": ["cut:rank3@20s+5s"]}, "").fault_schedule()
    assert (fault.rank, fault.step, fault.after, fault.lasts) == (3, None, 20.0, 5.0)


def test_one_fault_may_be_written_without_a_list() -> None:
    text = "kill:rank2@step10"
    assert [str(fault) for fault in RunSpec.load({"faults": text}, "a.toml").faults] == [text]
    assert spec_from_flags({}, [f"faults={text}"]).faults == spec_from_flags({"fault": [text]}).faults
    for value in (5, {"kill": 2}, [5]):
        with pytest.raises(SpecError, match=r"^a\.toml: faults.*: must be (text|a list)\. Write e\.g\. "):
            RunSpec.load({"faults": value}, "a.toml")
