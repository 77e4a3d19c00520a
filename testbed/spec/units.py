"""Parse and print sizes, rates and durations (5MiB, 200mbit, 20ms). A printed value can be parsed again.

Also the size of a rate's token bucket, and the length of time intervals. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from testbed.spec.errors import refuse

SIZE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# A token bucket holds what the link sends in 4 ms: enough for late kernel timers, too small to change a measurement.
BURST_S = 0.004
MIN_BURST_BYTES = 16 * 1024  # a smaller bucket holds too few frames to be filled evenly
_NUMBER = re.compile(r"(\d{1,16}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)
_MAX_VALUE = 10**15  # in the smallest unit: a float holds it exactly, and it has at most the 16 digits of _NUMBER


def _parse(what: str, text: str, units: dict[str, int], example: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    unit = next((u for u in units if match and u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        rule = f"needs a number and one of {', '.join(u for u in units if u)}"
        raise refuse(what, text, rule, f"Write e.g. {example}.")
    value = round(float(match[1]) * units[unit])
    if not 1 <= value <= _MAX_VALUE:
        rule = "must be greater than 0" if value < 1 else f"must be at most {_MAX_VALUE} {next(u for u in units if u)}"
        raise refuse(what, text, rule, f"Write e.g. {example}.")
    return value


def _format(value: int, units: dict[str, int], among: tuple[str, ...]) -> str:
    """Return the value in the largest unit that gives a whole number."""
    unit = next(u for u in among if value % units[u] == 0)
    return f"{value // units[unit]}{unit}"


def parse_size(text: str) -> int:
    """Return the bytes of a text: 5242880 for '5MiB'. Raises SpecError."""
    return _parse("size", text, SIZE_UNITS, "5MiB")


def format_size(value: int) -> str:
    """Return the exact text of a number of bytes, which can be parsed again: '5MiB' for 5242880."""
    return _format(value, SIZE_UNITS, ("GiB", "MiB", "KiB", "B"))


def approximate_size(value: int) -> str:
    """Return a rounded text of a number of bytes for messages: '3.3 MB' for 3276800."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} bytes"


def in_megabytes(value: float, digits: int = 1) -> str:
    """Return bytes for a column in MB: '12.3' for 12_340_000. Less than 0.1 MB has its unit: '34.1 kB' for 34_100."""
    return f"{value / 1e3:.{digits}f} kB" if 0 < value < 1e5 else f"{value / 1e6:.{digits}f}"


def parse_rate(text: str) -> int:
    """Return the bit/s of a text: 200_000_000 for '200mbit'. Raises SpecError."""
    return _parse("rate", text, RATE_UNITS, "200mbit")


def format_rate(value: int) -> str:
    """Return the exact text of a rate in bit/s, which can be parsed again and which tc accepts: '200mbit'."""
    return _format(value, RATE_UNITS, ("gbit", "mbit", "kbit", "bit"))


def burst_bytes(rate: int) -> int:
    """Return the size of the token bucket in bytes for `rate` bit/s."""
    return max(MIN_BURST_BYTES, math.ceil(rate * BURST_S / 8))


def parse_duration(text: str) -> float:
    """Return the seconds of a text: 0.020 for '20ms'. Raises SpecError."""
    return _parse("duration", text, {"us": 1, "ms": 10**3, "s": 10**6}, "20ms") / 1e6


def format_duration(seconds: float) -> str:
    """Return the text of a number of seconds: '20ms' for 0.020."""
    return _format(round(seconds * 1e6), {"us": 1, "ms": 10**3, "s": 10**6}, ("s", "ms", "us"))


Interval = tuple[float, float]  # begin and end of a time span, in seconds


def covered_length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one interval covers."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):  # max() would be slower, and this runs in every step of a user's script
        start = begin if begin > reached else reached
        if end > start:
            covered += end - start
            reached = end
    return covered
