"""SyncMode: one spelling everywhere, and illegal cells are refused with the reason."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.results import theory
from testbed.spec.errors import SpecError
from testbed.spec.mode import (
    ALGORITHMS,
    CODECS,
    USER_METHOD,
    Rounds,
    SyncMode,
    Transfer,
    algorithms,
    codecs_of,
    every_of,
    legal_modes,
)

ROOT = Path(__file__).parents[3]
SIZES = st.integers(1, 2**40)
EVERY = st.tuples(st.integers(1, 999_999), st.none() | st.integers(0, 999_999_999))
NUMBERED = {"topk": st.floats(0, 1.1).map("{:.6f}".format), "powersgd": st.integers(0, 1100).map(str)}
CODEC = st.sampled_from(["fp16", "bf16", "int8", *NUMBERED]).flatmap(
    lambda name: NUMBERED[name].map(lambda number: f"{name}:{number}") if name in NUMBERED else st.just(name)
)

OURS = ("ring", "direct", "ring-reduce", "tree", "halving")


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Any sentence of algorithm[/granularity][/schedule][/codec][/every:K[@M]], legal or not."""
    words = [draw(st.sampled_from(sorted(ALGORITHMS)))]
    granularity = draw(st.sampled_from(["", "param", "flat", "bucket"]))
    if granularity:
        words.append(f"bucket:{draw(SIZES)}B" if granularity == "bucket" else granularity)
    words += draw(st.sampled_from([[], ["after"], ["overlap"], ["pipeline"]]))
    words += draw(st.sampled_from([[], [draw(CODEC)]]))
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
def test_a_text_has_one_spelling_or_is_refused_with_a_sentence(text: str) -> None:
    try:
        mode = SyncMode.parse(text)
    except SpecError as refusal:
        assert repr(text) in str(refusal)
        assert str(refusal).endswith(".")
        return
    assert SyncMode.parse(str(mode)) == mode
    assert str(SyncMode.parse(str(mode))) == str(mode)


@given(st.text(max_size=40))
def test_any_text_parses_or_raises_spec_error(text: str) -> None:
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
        ("ring/flat/after/fp16", "ring/fp16"),
        ("direct/topk:.010", "direct/topk:0.01"),
        ("direct/topk:0.000001", "direct/topk:0.000001"),
        ("direct/topk:1", "direct/topk:1"),
        ("ring/powersgd:04", "ring/powersgd:4"),
        ("ring/fp16/every:1", "ring/fp16"),
    ],
)
def test_defaults_are_left_out_when_printing(text: str, printed: str) -> None:
    assert str(SyncMode.parse(text)) == printed


# --- short names have documented defaults ----------------------------------------------------------------------------


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


def test_a_pipeline_without_a_size_leaves_it_open() -> None:
    mode = SyncMode.parse("ring/pipeline")
    assert mode.leaves_bucket_open and (mode.granularity, mode.bucket) == ("bucket", None)
    assert not any(SyncMode.parse(text).leaves_bucket_open for text in ("ring", "ddp", "ring/bucket:1MiB/pipeline"))


def test_the_matrix_has_every_algorithm_times_granularity_times_schedule() -> None:
    named = {"single", "none", "ddp", "server", "gather", "allreduce", *OURS}
    assert sorted(str(mode) for mode in legal_modes("1MiB") if mode.algorithm in named) == sorted(
        ["single", "none", "ddp", "ddp/bucket:1MiB", "server", "server/param", "server/bucket:1MiB"]
        + [f"{a}{g}" for a in ("gather", "allreduce") for g in ("", "/bucket:1MiB", "/flat")]
        + [f"{a}{g}/overlap" for a in ("gather", "allreduce") for g in ("", "/bucket:1MiB")]
        + [f"{a}{g}" for a in OURS for g in ("", "/param", "/bucket:1MiB")]
        + [f"{a}{g}/overlap" for a in OURS for g in ("/param", "/bucket:1MiB")]
        + ["ring/bucket:1MiB/pipeline", "ring/pipeline"]
    )


def test_summable_codecs_follow_most_modes_and_the_others_follow_direct_only() -> None:
    assert codecs_of(SyncMode.parse("direct/param/overlap")) == ["fp16", "bf16", "int8", "topk:0.01", "powersgd:2"]
    assert codecs_of(SyncMode.parse("tree")) == codecs_of(SyncMode.parse("ddp")) == ["fp16", "bf16", "powersgd:2"]
    assert all(codecs_of(SyncMode.parse(m)) == [] for m in ("single", "none", "server", "ring/bucket:1MiB/pipeline"))
    assert SyncMode.parse("ring/fp16").synchronous


@pytest.mark.parametrize("mode", [f"{mode}/{codec}" for mode in legal_modes() for codec in codecs_of(mode)])
def test_every_coded_mode_prints_back_to_itself(mode: str) -> None:
    assert str(SyncMode.parse(mode)) == mode


def test_only_single_is_not_distributed_and_only_every_is_not_synchronous() -> None:
    assert [str(mode) for mode in legal_modes() if not mode.distributed] == ["single"]
    assert [str(mode) for mode in legal_modes() if not mode.synchronous] == ["none"]
    assert not SyncMode.parse("ring/every:2").synchronous


def test_every_k_follows_modes_whose_exchange_is_a_step_of_its_own() -> None:
    for mode in legal_modes():
        allowed = mode.separable and mode.schedule == "after"
        assert every_of(mode) == (["every:4", "every:4@100"] if allowed else []), mode


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
        ("single/every:2", "one node has no other node to average with"),
        ("ddp/param", "ddp takes bucket only"),
        ("ddp/flat", "ddp takes bucket only"),
        ("ddp/after", "ddp takes no schedule: DDP has its own"),
        ("ddp/every:2", "use allreduce/.../every:K"),
        ("server/every:2", "no other rank can take a local step"),
        ("single/fp16", "fp16 changes what is sent, and single sends nothing"),
        ("none/int8", "none sends nothing"),
        ("ring/int8", "int8 has payloads that cannot be summed, and ring sums them"),
        ("allreduce/topk:0.01", "Use direct/topk:0.01."),
        ("ddp/int8", "int8 has no hook in torch's DDP. Use direct/bucket:5MiB/overlap/int8."),
        ("server/bf16", "half of what is sent are parameters"),
        ("direct/bucket:2MiB/pipeline", "sends shards round a ring, over connections of its own; direct does not"),
        ("ring/flat/pipeline", "a flat one is full only when backward is over. Use ring/pipeline or bucket:SIZE."),
        ("tree/pipeline", "Use ring/pipeline."),
        ("ring/pipeline/bucket:2MiB", "'bucket:2MiB' is unknown, repeated or out of place"),
        ("ring/bucket:2MiB/pipeline/fp16", "half of what is sent are parameters"),
        ("ring/fp16/every:4", "every:K averages parameters, and a rounding error of fp16 in them is never corrected"),
        ("ring/fp16/overlap", "'overlap' is unknown, repeated or out of place"),
        ("ring/fp16/bf16", "'bf16' is unknown, repeated or out of place"),
        ("ring/fp16:2", "fp16 takes no number"),
        ("direct/topk", "topk needs a fraction greater than 0 and at most 1"),
        ("direct/topk:0", "topk needs a fraction"),
        ("direct/topk:1.1", "topk needs a fraction"),
        ("direct/topk:1e-3", "topk needs a fraction"),
        ("ring/powersgd:0", "powersgd needs a whole number"),
        ("ring/powersgd:1.5", "powersgd needs a whole number"),
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


def test_properties_of_a_mode_depend_on_its_algorithm_not_on_its_name(own_methods: Path) -> None:
    """A user's method named ddp-x is not DDP."""
    (own_methods / "ddp_x.py").write_text("def mean_(buffer, group): ...\n")

    def those(fact: str) -> set[str]:
        return {name for name in algorithms() if getattr(SyncMode.parse(name), fact)}

    assert those("is_control") == {"none"} and those("silent") == {"none", "single"}
    assert those("is_reference") == {"ddp"} and those("rooted") == {"gather", "server"}
    assert set(algorithms()) - those("separable") == {"single", "none", "server", "ddp"}


def test_without_its_file_the_mode_is_unknown(own_methods: Path) -> None:
    with pytest.raises(SpecError, match="unknown algorithm 'my-way'"):
        SyncMode.parse("my-way")


def test_an_own_file_cannot_replace_a_built_in_algorithm(own_methods: Path) -> None:
    (own_methods / "ring.py").write_text("def mean_(buffer, group): ...\n")
    (own_methods / "ring_reduce.py").write_text("def mean_(buffer, group): ...\n")
    assert algorithms() == ALGORITHMS


def test_hidden_and_private_files_are_not_modes(own_methods: Path) -> None:
    for name in ("__init__.py", "_helper.py", ".x.py", "notes.txt"):
        (own_methods / name).write_text("")
    assert algorithms() == ALGORITHMS


# --- rows: rounds, formulas, colours, documents ------------------------------------------------------------------

WITH_ROUNDS = [name for name, row in ALGORITHMS.items() if row.rounds]
RANKS = range(2, 18)


def carry_out(rounds: Rounds, n: int) -> list[list[Counter[int]]]:
    """Carry out the rounds on paper: for every rank and every slice of the buffer, whose gradients are in it.

    Slices are so short that every transfer begins and ends between two of them.
    """
    every = [*rounds.reduce, *rounds.gather]
    cuts = sorted({0, 1, *(cut for round_ in every for t in round_ for cut in (t.begin, t.end))})
    held = [[Counter({rank: 1}) for _ in cuts[1:]] for rank in range(n)]

    def slices(transfer: Transfer) -> range:
        return range(cuts.index(transfer.begin), cuts.index(transfer.end))

    for number, round_ in enumerate(every):
        sent = [(t.receiver, k, held[t.sender][k].copy()) for t in round_ for k in slices(t)]
        for receiver, k, arrived in sent:
            held[receiver][k] = held[receiver][k] + arrived if number < len(rounds.reduce) else arrived
    return held


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_the_rounds_leave_every_rank_the_sum_of_all_gradients_each_added_once(name: str, n: int) -> None:
    make = ALGORITHMS[name].rounds
    assert make is not None
    complete = Counter(range(n))
    assert all(each == complete for slices in carry_out(make(n), n) for each in slices)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_the_reduce_of_a_sharded_algorithm_leaves_each_rank_the_sum_of_its_own_shard(name: str, n: int) -> None:
    make = ALGORITHMS[name].rounds
    assert make is not None
    held = carry_out(Rounds(make(n).reduce), n)
    assert all(held[rank][rank] == Counter(range(n)) for rank in range(n))


@pytest.mark.parametrize("name", [*WITH_ROUNDS, "direct/topk:0.01"])
def test_the_formula_of_a_row_is_the_time_of_its_rounds(name: str) -> None:
    mode = SyncMode.parse(name)
    for n in RANKS:
        known = theory.cost(mode, n)
        assert known is not None and known.load == pytest.approx(evaluate(mode.time, n))


RACKS = [
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0,), (1, 2, 3)),
    ((0, 1, 2), (3, 4)),
    ((0, 1), (2, 3, 4), (5,)),
    ((0, 1, 2, 3),),
    ((3,), (1,), (0,), (2,)),
    ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9)),
]


@pytest.mark.parametrize("racks", RACKS)
def test_the_rounds_of_hierarchical_leave_every_rank_the_sum_in_any_racks(racks: tuple[tuple[int, ...], ...]) -> None:
    n = sum(map(len, racks))
    rounds = SyncMode.parse("hierarchical").rounds(n, racks)
    assert rounds is not None
    assert all(each == Counter(range(n)) for slices in carry_out(rounds, n) for each in slices)


@pytest.mark.parametrize(("r", "m"), [(2, 2), (2, 3), (3, 2), (4, 4), (1, 4), (4, 1)])
def test_the_formula_of_hierarchical_is_the_time_of_its_rounds(r: int, m: int) -> None:
    """An uplink that is M times faster than a link takes as long as all links of its rack together."""
    racks = tuple(tuple(range(m * k, m * k + m)) for k in range(r))
    slower = 5.0
    known = theory.cost(SyncMode.parse("hierarchical"), r * m, theory.Uplinks(racks, slower))
    assert known is not None
    assert known.load == pytest.approx(2 * (m - 1) / m + slower * 2 * (r - 1) / r)


def evaluate(formula: str, n: int) -> float:
    """The factor of S/B in a formula such as `2(N-1)/N S/B`; P is the largest power of two up to N."""
    values = {"N": n, "P": 1 << (n.bit_length() - 1), "log2": lambda n: math.ceil(math.log2(n))}
    first, _, more = formula.partition(", and ")
    if more:
        extra, _, condition = more.partition(" more if ")
        return evaluate(first, n) + (evaluate(extra, n) if eval(condition, values) else 0)
    factor = first.removesuffix(" S/B").replace("2 log2", "2*log2").replace("2(", "2*(").replace("log2*(", "log2(")
    return float(eval(factor, values))


def test_what_sends_nothing_has_no_rounds_and_takes_no_time() -> None:
    silent = {name for name in ALGORITHMS if SyncMode.parse(name).silent}
    assert silent == {name for name in ALGORITHMS if SyncMode.parse(name).rounds(4) is None}
    assert all((ALGORITHMS[name].time == "0") == (name in silent) for name in ALGORITHMS)


def test_colours_are_distinct_so_that_a_figure_can_name_them() -> None:
    rows = [*ALGORITHMS.values(), USER_METHOD]
    for page in (0, 1):
        colours = [row.colour[page] for row in rows]
        assert len(set(colours)) == len(rows)
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_every_codec_has_an_example_that_parses() -> None:
    for name, codec in CODECS.items():
        assert SyncMode.parse(f"direct/{codec.example}").codec == name
