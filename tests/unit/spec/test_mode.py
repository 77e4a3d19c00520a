"""SyncMode: one spelling everywhere, and illegal cells are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.mode import ALGORITHMS, SyncMode, algorithms, legal_modes

SIZES = st.integers(1, 2**40)
EVERY = st.tuples(st.integers(1, 999_999), st.none() | st.integers(0, 999_999_999))

OURS = ("ring", "direct", "ring-reduce", "tree", "halving")


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Any sentence of algorithm[/granularity][/after][/every:K[@M]], legal or not."""
    words = [draw(st.sampled_from(sorted(ALGORITHMS)))]
    granularity = draw(st.sampled_from(["", "param", "flat", "bucket"]))
    if granularity:
        words.append(f"bucket:{draw(SIZES)}B" if granularity == "bucket" else granularity)
    if draw(st.booleans()):
        words.append("after")
    if draw(st.booleans()):
        every, start = draw(EVERY)
        words.append(f"every:{every}" + ("" if start is None else f"@{start}"))
    return "/".join(words)


# --- it parses and prints back to itself -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(legal_modes()), ids=str)
def test_every_legal_mode_prints_back_to_itself(mode: SyncMode) -> None:
    assert SyncMode.parse(str(mode)) == mode
    assert str(SyncMode.parse(str(mode))) == str(mode)


@given(spellings())
def test_whatever_parses_has_one_spelling_and_the_rest_is_refused_with_a_sentence(text: str) -> None:
    try:
        mode = SyncMode.parse(text)
    except SpecError as refusal:
        assert repr(text) in str(refusal)
        assert str(refusal).endswith(".")
        return
    assert SyncMode.parse(str(mode)) == mode
    assert str(SyncMode.parse(str(mode))) == str(mode)


@given(st.text(max_size=40))
def test_no_text_at_all_makes_the_parser_fall_over(text: str) -> None:
    try:
        mode = SyncMode.parse(text)
    except SpecError:
        return
    assert SyncMode.parse(str(mode)) == mode


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("ring/flat", "ring"),
        ("ring/flat/after", "ring"),
        ("allreduce/param/after", "allreduce"),
        ("ring/bucket:5120KiB", "ring/bucket:5MiB"),
        ("ring/every:1", "ring"),
        ("ring/every:1@7", "ring"),
        ("ring/every:4@0", "ring/every:4"),
        ("ring/flat/every:4@100", "ring/every:4@100"),
        (" ddp/bucket:25MiB ", "ddp/bucket:25MiB"),
    ],
)
def test_defaults_are_left_out_when_printing(text: str, printed: str) -> None:
    assert str(SyncMode.parse(text)) == printed


# --- short names mean what DESIGN says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        ("gather", "param"),
        ("allreduce", "param"),
        ("ring", "flat"),
        ("tree", "flat"),
        ("halving", "flat"),
        ("ring-reduce", "flat"),
        ("server", "flat"),
        ("ddp", None),
        ("single", None),
    ],
)
def test_a_short_name_has_its_documented_default(name: str, granularity: str | None) -> None:
    mode = SyncMode.parse(name)
    assert (mode.granularity, mode.schedule, mode.every, mode.bucket) == (granularity, "after", 1, None)


def test_all_short_names_are_tested_above() -> None:
    assert set(ALGORITHMS) == {
        "single", "gather", "allreduce", "ring", "ring-reduce", "tree", "halving", "server", "ddp", "none", "direct",
    }  # fmt: skip


def test_the_matrix_has_every_algorithm_times_granularity_times_schedule() -> None:
    assert sorted(str(mode) for mode in legal_modes("1MiB")) == sorted(
        ["single", "none", "ddp", "ddp/bucket:1MiB", "server", "server/param", "server/bucket:1MiB"]
        + [f"{a}{g}" for a in ("gather", "allreduce") for g in ("", "/bucket:1MiB", "/flat")]
        + [f"{a}{g}/overlap" for a in ("gather", "allreduce") for g in ("", "/bucket:1MiB")]
        + [f"{a}{g}" for a in OURS for g in ("", "/param", "/bucket:1MiB")]
        + [f"{a}{g}/overlap" for a in OURS for g in ("/param", "/bucket:1MiB")]
        + [f"{a}/bucket:1MiB/pipeline" for a in ("ring", "direct")]
    )


def test_only_single_is_not_distributed_and_only_every_is_not_synchronous() -> None:
    assert [str(mode) for mode in legal_modes() if not mode.distributed] == ["single"]
    assert [str(mode) for mode in legal_modes() if not mode.synchronous] == ["none"]
    assert not SyncMode.parse("ring/every:2").synchronous


# --- illegal cells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("star", "unknown algorithm 'star'. Known: single, none, gather"),
        ("", "unknown algorithm ''"),
        ("Ring", "unknown algorithm 'Ring'"),
        ("ring/huge", "'huge' is unknown, repeated or out of place"),
        ("ring/", "'' is unknown, repeated or out of place"),
        ("ring/flat/param", "'param' is unknown, repeated or out of place"),
        ("ring/every:2/flat", "'flat' is unknown, repeated or out of place"),
        ("ring/after/flat", "'flat' is unknown, repeated or out of place"),
        ("ring/every:2/every:2", "unknown, repeated or out of place"),
        ("ring/flat:5MiB", "flat takes no size"),
        ("ring/bucket", "needs a number and one of"),
        ("ring/bucket:0", "must be greater than 0"),
        ("ring/bucket:big", "needs a number and one of"),
        ("ring/every:0", "K of at least 1"),
        ("ring/every:-1", "unknown, repeated or out of place"),
        ("ring/every:x", "unknown, repeated or out of place"),
        ("single/flat", "single takes no granularity"),
        ("single/after", "single takes no schedule: nothing is synchronised"),
        ("single/every:2", "one node has nobody to average with"),
        ("ddp/param", "ddp takes bucket only"),
        ("ddp/flat", "ddp takes bucket only"),
        ("ddp/after", "ddp takes no schedule: DDP has its own"),
        ("ddp/every:2", "use allreduce/.../every:K"),
        ("server/every:2", "no rank can step alone"),
    ],
)
def test_an_illegal_cell_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as refusal:
        SyncMode.parse(text)
    assert reason in str(refusal.value)


# --- the user's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    return tmp_path


def test_a_file_in_the_methods_folder_is_a_mode(own_methods: Path) -> None:
    (own_methods / "my_way.py").write_text("def mean_(buffer, group): ...\n")
    mode = SyncMode.parse("my-way/bucket:1MiB/every:2")
    assert str(mode) == "my-way/bucket:1MiB/every:2"
    assert str(own_methods / "my_way.py") in algorithms()["my-way"].does
    assert {"my-way", "my-way/param", "my-way/bucket:5MiB"} <= {str(m) for m in legal_modes()}


def test_without_its_file_the_mode_is_unknown(own_methods: Path) -> None:
    with pytest.raises(SpecError, match="unknown algorithm 'my-way'"):
        SyncMode.parse("my-way")


def test_an_own_file_cannot_replace_a_built_in_algorithm(own_methods: Path) -> None:
    (own_methods / "ring.py").write_text("def mean_(buffer, group): ...\n")
    (own_methods / "ring_reduce.py").write_text("def mean_(buffer, group): ...\n")
    assert algorithms() == ALGORITHMS


def test_hidden_and_private_files_are_no_modes(own_methods: Path) -> None:
    for name in ("__init__.py", "_helper.py", ".x.py", "notes.txt"):
        (own_methods / name).write_text("")
    assert algorithms() == ALGORITHMS
