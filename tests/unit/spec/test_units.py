"""Sizes, rates and durations: what people write, and that it prints back to what it parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.units import (
    burst_bytes,
    format_duration,
    format_rate,
    format_size,
    in_megabytes,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5MiB", 5 * 2**20), ("1.5KiB", 1536), ("25MB", 25_000_000), ("7", 7), ("7B", 7), (" 2 gib ", 2 * 2**30)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 200_000_000), ("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("64kbit", 64_000)]
)
def test_a_rate_is_in_bit_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.020), ("50us", 50e-6), ("1.5s", 1.5)])
def test_a_duration_is_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["fast", "", "200", "200mb", "-1mbit", "1e9bit", "nanmbit", "infgbit", "1,5gbit", "1mbit; reboot"]
)
def test_a_rate_that_is_none_is_refused_with_the_units_and_an_example(text: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_rate(text)
    assert repr(text) in str(refusal.value)
    assert "bit, kbit, mbit, gbit" in str(refusal.value)
    assert "Write e.g. 200mbit." in str(refusal.value)


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_rate, "0mbit"), (parse_size, "0"), (parse_size, "0.1B"), (parse_duration, "0.4us")]
)
def test_nothing_is_not_an_amount(parse: object, text: str) -> None:
    with pytest.raises(SpecError, match="greater than 0"):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "text"), [(5 * 2**20, "5MiB"), (1536, "1536B"), (2**30, "1GiB"), (3 * 2**10, "3KiB")]
)
def test_a_size_prints_in_the_largest_exact_unit(value: int, text: str) -> None:
    assert format_size(value) == text


def test_rates_and_durations_print_in_the_largest_exact_unit() -> None:
    assert [format_rate(r) for r in (10**9, 1_500_000_000, 1_001)] == ["1gbit", "1500mbit", "1001bit"]
    assert [format_duration(s) for s in (2.0, 0.02, 0.0015)] == ["2s", "20ms", "1500us"]


NUMBERS = st.decimals(min_value=0, max_value=999_999_999_999, places=6, allow_nan=False, allow_infinity=False)


@given(NUMBERS, st.sampled_from(["", "B", "KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_every_size_that_parses_prints_back_to_itself(number: object, unit: str) -> None:
    _round_trip(parse_size, format_size, f"{number}{unit}")


@given(NUMBERS, st.sampled_from(["bit", "kbit", "mbit", "gbit"]))
def test_every_rate_that_parses_prints_back_to_itself(number: object, unit: str) -> None:
    _round_trip(parse_rate, format_rate, f"{number}{unit}")


@given(NUMBERS, st.sampled_from(["us", "ms", "s"]))
def test_every_duration_that_parses_prints_back_to_itself(number: object, unit: str) -> None:
    _round_trip(parse_duration, format_duration, f"{number}{unit}")


def _round_trip(parse, form, text: str) -> None:  # type: ignore[no-untyped-def]
    try:
        value = parse(text)
    except SpecError:
        return  # refused is fine; accepted and then unreadable is not
    assert parse(form(value)) == value


def test_a_burst_is_4_ms_of_the_rate_and_at_least_16_kib() -> None:
    assert burst_bytes(10**9) == 500_000 and burst_bytes(10**7) == 16 * 1024


def test_megabytes_of_a_column_have_a_unit_where_they_are_few() -> None:
    values = (0, 40, 34_100, 99_999, 100_000, 12_340_000)
    assert [in_megabytes(value) for value in values] == ["0.0", "0.0 kB", "34.1 kB", "100.0 kB", "0.1", "12.3"]
