"""All exceptions are in one tree; what a message quotes is not trusted, so it is stripped and cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.spec import errors
from testbed.spec.base import Spec
from testbed.spec.errors import (
    MAX_QUOTE_CHARS,
    PeerLost,
    SpecError,
    TestbedError,
    Unavailable,
    UsageError,
    one_line,
    refuse,
    require_extra,
    strip_control_chars,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TestbedError)]
OBEYED = "\x1b]0;owned\x07\x1b[31m"


@pytest.mark.parametrize("kind", [TestbedError, SpecError, PeerLost])
def test_control_characters_in_a_message_are_replaced(kind: type[TestbedError]) -> None:
    words = str(kind(f"rank 1:\n\tdied of {OBEYED}, é\u202e"))
    assert words == "rank 1:\n\tdied of ?]0;owned??[31m, é?"


def test_quoted_text_is_one_line_of_bounded_length() -> None:
    assert one_line("a\nb\tc  d\r") == "a b c d?"
    assert one_line("x" * MAX_QUOTE_CHARS) == "x" * MAX_QUOTE_CHARS
    assert one_line("x" * 100_000) == "x" * MAX_QUOTE_CHARS + "... (100000 characters)"
    assert strip_control_chars("a\n\tb") == "a\n\tb"


class Named(Spec):
    by: dict[str, int]


def test_an_unknown_key_is_cut_too() -> None:
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


def test_no_other_module_defines_an_exception() -> None:
    bases = "|".join(["Exception", r"\w+Error", *(kind.__name__ for kind in KINDS)])
    package = Path(errors.__file__).parents[1]
    found = {path: re.findall(rf"^class \w+\((?:{bases})\)", path.read_text(), re.M) for path in package.rglob("*.py")}
    assert [path for path, classes in found.items() if classes] == [Path(errors.__file__)]


def test_every_exception_is_drawn_in_the_tree_with_its_exit_code() -> None:
    drawn = dict(re.findall(r"^[│├└─ ]*(\w+) +(\d*) {2,}\S", errors.__doc__ or "", re.M))
    assert set(drawn) == {kind.__name__ for kind in KINDS}
    assert all(kind.exit_code == int(drawn[kind.__name__] or kind.exit_code) for kind in KINDS)


@pytest.mark.parametrize("kind", [SpecError, Unavailable])
def test_a_refusal_has_the_value_the_rule_and_the_way_out(kind: type[UsageError]) -> None:
    error = refuse("nodes", 1, "mode ring needs at least 2", "Use --nodes 2.", kind)
    assert type(error) is kind and str(error) == "nodes 1: mode ring needs at least 2. Use --nodes 2."
