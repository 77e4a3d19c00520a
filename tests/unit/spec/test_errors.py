"""What a message quotes may be a stranger's: no terminal obeys it, and a person can read to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.spec.base import Spec
from testbed.spec.errors import (
    MAX_QUOTE_CHARS,
    PeerLost,
    SpecError,
    TestbedError,
    Unavailable,
    one_line,
    require_extra,
    strip_control_chars,
)

OBEYED = "\x1b]0;owned\x07\x1b[31m"


@pytest.mark.parametrize("kind", [TestbedError, SpecError, PeerLost])
def test_an_error_says_nothing_that_a_terminal_obeys(kind: type[TestbedError]) -> None:
    words = str(kind(f"rank 1:\n\tdied of {OBEYED}, é\u202e"))
    assert words == "rank 1:\n\tdied of ?]0;owned??[31m, é?"


def test_words_of_somebody_else_are_one_line_of_bounded_length() -> None:
    assert one_line("a\nb\tc  d\r") == "a b c d?"
    assert one_line("x" * MAX_QUOTE_CHARS) == "x" * MAX_QUOTE_CHARS
    assert one_line("x" * 100_000) == "x" * MAX_QUOTE_CHARS + "... (100000 characters)"
    assert strip_control_chars("a\n\tb") == "a\n\tb"


class Named(Spec):
    by: dict[str, int]


def test_a_key_that_somebody_made_up_is_cut_too() -> None:
    with pytest.raises(SpecError) as refusal:
        Named.load({"by": {OBEYED + "x" * 10_000: "no"}}, "file")
    assert "\x1b" not in str(refusal.value) and len(str(refusal.value)) < 3 * MAX_QUOTE_CHARS


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_extra("numbers", "rank", "numpy")
    (tmp_path / "absent_package").mkdir()  # as docker/ of a clone is: a folder, and no package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable) as caught:
        require_extra("substrate x", "compose", "numpy", "absent_package")
    assert str(caught.value) == (
        "substrate x: needs the package absent_package of the extra `compose`, which is not installed."
        " Install it with: pip install 'testbed[compose]'"
    )
    assert caught.value.exit_code == 2
