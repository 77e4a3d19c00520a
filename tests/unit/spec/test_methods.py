"""A user's own methods: which files are modes, and why the others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.spec.errors import SpecError
from testbed.spec.methods import method_path, own_methods
from testbed.spec.mode import ALGORITHMS, SyncMode, algorithms, check_method, legal_modes, unusable_methods

GOOD = "def mean_(buffer, group): ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("stem", ["my_meth2", "plain", "v1_2_3"])
def test_a_method_may_be_spelled_like_its_file(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(GOOD)
    name = stem.replace("_", "-")
    assert SyncMode.parse(f"{stem}/param") == SyncMode.parse(f"{name}/param")
    assert str(SyncMode.parse(stem)) == name
    assert method_path(name) == folder / f"{stem}.py"


@pytest.mark.parametrize("stem", ["ring", "ring_reduce", "single", "ddp"])
def test_the_name_of_a_built_in_mode_is_named_with_the_reason(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(GOOD)
    name = stem.replace("_", "-")
    reason = f"{name} is a built-in mode. Rename the file"
    assert unusable_methods() == {str(folder / f"{stem}.py"): reason}
    assert name in {str(mode) for mode in legal_modes()} and algorithms() == ALGORITHMS
    with pytest.raises(SpecError) as refusal:  # who writes ring.py and runs --mode ring means that file
        check_method(SyncMode.parse(name))
    assert str(refusal.value) == f"mode '{name}': {folder / f'{stem}.py'} cannot be used: {reason}."


@pytest.mark.parametrize("stem", ["2fast", "MyMeth", "my-meth", "my meth", "größer"])
def test_a_name_that_cannot_be_spelled_is_named_with_the_rule(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(GOOD)
    rule = "a name begins with a lower-case letter and has letters, digits and _ only. Rename the file"
    assert unusable_methods() == {str(folder / f"{stem}.py"): rule}
    with pytest.raises(SpecError, match=rf"unknown algorithm .* {stem}\.py cannot be used: {rule}|{stem}\.py"):
        SyncMode.parse(stem)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def mean_(buffer, group)\n", "line 1: expected ':'. Fix the file"),
        ("x = 1\n", "defines no mean_(buffer, group). Add it"),
        ("def mean(buffer, group): ...\n", "defines no mean_(buffer, group). Add it"),
        ("def mean_(buffer): ...\n", "its mean_ does not take two arguments. Write mean_(buffer, group)"),
        ("def mean_(buffer, group, more): ...\n", "its mean_ does not take two arguments. Write mean_(buffer, group)"),
        ("x = '\udc80'\n", "Fix the file"),
    ],
)
def test_a_broken_file_is_not_listed_as_legal_and_refused_with_the_reason(folder: Path, code: str, reason: str) -> None:
    (folder / "mine.py").write_bytes(code.encode(errors="surrogateescape"))
    assert unusable_methods()[str(folder / "mine.py")].endswith(reason)
    assert not [mode for mode in legal_modes() if mode.algorithm == "mine"]
    with pytest.raises(SpecError, match=r"mode 'mine/param': .*mine\.py cannot be used: "):
        check_method(SyncMode.parse("mine/param"))
    with pytest.raises(SpecError) as unknown:
        SyncMode.parse("nosuch")
    known, _, others = str(unknown.value).partition("Known: ")[2].partition(". ")
    assert "mine" not in known.split(", ") and "mine.py cannot be used" in others


@pytest.mark.parametrize(
    "code",
    [
        "from elsewhere import mean_\n",
        "from elsewhere import fast as mean_\n",
        "mean_ = print\n",
        "def mean_(*all): ...\n",
        "def mean_(buffer, group, *, segments=4): ...\n",
        "if True:\n    mean_ = print\n",
    ],
)
def test_nothing_is_held_against_a_file_that_may_define_it(folder: Path, code: str) -> None:
    (folder / "mine.py").write_text(code)
    assert [method.problem for method in own_methods(ALGORITHMS)] == [""]
    check_method(SyncMode.parse("mine"))
