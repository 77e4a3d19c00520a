"""Link: parsed from text, kept exactly; a wrong value is refused with a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.link import Link, parse_shaping, why_not_shaped


def load(**values: object) -> Link:
    return Link.load(values, "here")


def test_a_link_without_values_is_unshaped() -> None:
    assert not Link().shaped
    assert not Link().needs_netem


def test_a_link_reads_text_and_writes_the_same_text() -> None:
    written = {
        "rate": "200mbit",
        "delay": "20ms",
        "jitter": "1500us",
        "loss": 0.01,
        "queue": "50ms",
        "segment": "16KiB",
    }
    link = load(**written)
    assert (link.rate, link.delay, link.loss, link.queue) == (200_000_000, 0.020, 0.01, 0.050)
    assert link.segment == 2**14 and link.model_dump() == written


def test_a_rate_alone_needs_no_netem_but_delay_and_loss_do() -> None:
    assert load(rate="1gbit").shaped
    assert not load(rate="1gbit").needs_netem
    assert load(delay="1ms").needs_netem
    assert load(loss=0.1).needs_netem
    assert load(delay="1ms").shaped


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rate": "fast"}, "here: rate = 'fast': needs a number and one of bit, kbit, mbit, gbit. Write e.g. 200mbit."),
        ({"rate": 0}, "rate = 0"),
        ({"rate": -5}, "rate = -5"),
        ({"loss": 1.0}, "loss = 1.0"),
        ({"loss": -0.1}, "loss = -0.1"),
        ({"loss": float("nan")}, "loss = nan"),
        ({"delay": float("inf")}, "delay = inf"),
        ({"delay": 1e-9}, "delay = 1e-09"),
        ({"queue": 0}, "queue = 0"),
        ({"jitter": "1ms"}, "link.jitter = '1ms': varies a delay, and none is set. Add e.g. link.delay = '20ms'."),
        ({"delay": "5ms", "jitter": "6ms"}, "link.jitter = '6ms': varies a delay of 5ms, which cannot be less than"),
        ({"bandwidth": "1gbit"}, "unknown key 'bandwidth'; known keys: delay, jitter, loss, queue, rate"),
    ],
)
def test_a_bad_value_is_refused_with_value_and_rule(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load(**values)
    assert sentence in str(refusal.value)


@given(
    rate=st.none() | st.integers(1, 10**12),
    delay=st.none() | st.floats(1e-6, 100),
    queue=st.floats(1e-6, 100),
    loss=st.floats(0, 1, exclude_max=True),
)
def test_every_link_survives_the_way_through_json(**values: object) -> None:
    link = load(**values)
    assert Link.model_validate_json(link.model_dump_json()) == link


def test_shaping_is_both_ways_unless_the_variable_says_otherwise() -> None:
    assert [parse_shaping(text) for text in ("", "both", "egress", "off")] == ["both", "both", "egress", "off"]
    with pytest.raises(SpecError, match=r"SHAPING 'some': must say which directions .*Use one of both, egress, off\."):
        parse_shaping("some")


def test_a_run_that_is_not_shaped_both_ways_says_why_it_is_left_out() -> None:
    assert [why_not_shaped(shaping) for shaping in ("both", "egress", "off", "none")] == [
        "",
        "SHAPING=egress: what arrives at a node is not shaped",
        "SHAPING=off: nothing is shaped",
        "",
    ]
