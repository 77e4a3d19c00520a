"""Documents agree with the files that they are made from: rows in testbed/spec, figures in results/."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs import generate
from tests.support import provenance

ROOT = Path(__file__).parents[2]
MEASURED = ("README.md", "docs/performance.md", "docs/results.md", "docs/faults.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


BLOCKS = [(name, block[2], block[0]) for name in generate.DOCUMENTS for block in generate.BLOCK.finditer(text_of(name))]


@pytest.mark.parametrize("name", generate.DOCUMENTS)
def test_every_document_is_up_to_date(name: str) -> None:
    assert generate.page(name, text_of(name)) == text_of(name), f"{name} is out of date. Run make docs."


@pytest.mark.parametrize(("name", "what", "block"), BLOCKS, ids=[f"{name}: {what}" for name, what, _ in BLOCKS])
def test_a_digit_changed_by_hand_is_found(name: str, what: str, block: str) -> None:
    """Every digit of every made line: `make docs` writes it again, and the test above fails until then."""
    head, *lines, foot = block.splitlines(keepends=True)
    assert lines, f"{name}: nothing is made for {what!r}"
    for number, line in enumerate(lines):
        for digit in re.finditer(r"\d", line):
            other = line[: digit.start()] + str((int(digit[0]) + 1) % 10) + line[digit.end() :]
            changed = "".join([head, *lines[:number], other, *lines[number + 1 :], foot])
            assert changed != block and generate.page(name, changed) == block


@pytest.mark.parametrize(
    ("name", "of_a_row"),
    [("docs/modes.md", "ring-reduce"), ("docs/faults.md", "SIGTERM to the rank"), (".env.example", "ring-reduce")],
)
def test_a_row_of_the_spec_is_written_again(name: str, of_a_row: str) -> None:
    text = text_of(name)
    made = generate.env_example if name == ".env.example" else lambda changed: generate.page(name, changed)
    assert of_a_row in text
    assert made(text) == text, f"{name} is out of date. Run make docs."
    assert made(text.replace(of_a_row, "")) == text, "it does not depend on the rows"


@pytest.mark.parametrize("name", MEASURED)
def test_no_table_has_a_figure_that_was_typed_by_hand(name: str) -> None:
    by_hand = generate.BLOCK.sub("", text_of(name))
    typed = [line for line in by_hand.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)]
    assert typed == [], "Put the figures into a file in results/, and marks into the document (CONTRIBUTING.md)"


NAMED = re.compile(r"(`\w[\w.]*\w`(?:(?:, | and )`\w[\w.]*\w`)*) in `([\w/]+\.py)`")


def test_a_name_that_the_architecture_puts_into_a_file_is_in_that_file() -> None:
    """`Class.method` in `folder/file.py`: folders are below testbed/, with or without that name."""
    rows = NAMED.findall(text_of("docs/architecture.md"))
    found = [(name, file) for names, file in rows for name in re.findall(r"`([\w.]+)`", names)]
    assert len(found) > 20
    absent = []
    for name, file in found:
        path = ROOT / "testbed" / file.removeprefix("testbed/")
        source = (path if path.exists() else ROOT / file).read_text(encoding="utf-8")
        absent += [f"{name} in {file}" for part in name.split(".") if not re.search(rf"\b{part}\b", source)]
    assert absent == []


def test_every_part_of_the_bench_is_in_a_table() -> None:
    named = {"step"} | {word for _, what, _ in BLOCKS for word in what.split()}
    parts = list(generate.bench_file())
    missing = [part for part in parts if part not in named and part.split("-")[0] not in named]
    assert missing == [], f"Write `<!-- begin bench {' '.join(missing)} (made ...) -->` and its end (CONTRIBUTING.md)"


def test_figures_older_than_the_rule_are_listed_and_each_table_says_so() -> None:
    """At most MOST_CHANGES commits may have changed the measured code since (docs/generate.py)."""
    found = generate.too_old()
    if found is None:
        pytest.skip("the history is not here: a shallow clone, or no git")
    assert found == generate.old(), "Measure these figures again (make measure), or show that they are old: make docs"
    shown = "".join(block for _, _, block in BLOCKS).count("Old: more than")
    assert bool(shown) == bool(found)


def test_a_release_has_no_old_figure() -> None:
    """The changelog of a release has nothing under [Unreleased]."""
    unreleased = text_of("CHANGELOG.md").partition("## [Unreleased]")[2].partition("\n## [")[0]
    assert unreleased.strip() or generate.old() == [], "Measure them again: make measure"


def test_continuous_integration_has_the_history_that_ages_are_counted_in() -> None:
    assert re.search(r"uses: actions/checkout@v4\n\s+with:\n\s+fetch-depth: 0\b", text_of(".github/workflows/ci.yml"))


@pytest.mark.parametrize(
    ("changes", "is_old"), [(0, False), (generate.MOST_CHANGES, False), (generate.MOST_CHANGES + 1, True), (None, True)]
)
def test_a_figure_is_old_after_too_many_changes_of_its_code(
    monkeypatch: pytest.MonkeyPatch, changes: int | None, is_old: bool
) -> None:
    """Or if its commit is not in the history. Only changes of the paths that it depends on are counted."""
    asked: dict[str, tuple[str, ...]] = {}

    def changes_since(commit: str, *paths: str) -> int | None:
        asked[commit] = paths
        return changes

    monkeypatch.setattr(generate, "has_whole_history", lambda: True)
    monkeypatch.setattr(generate, "changes_since", changes_since)
    monkeypatch.setattr(generate, "bench_file", lambda: {"loop": {"commit": "abc", "figures": []}})
    assert ("bench loop" in (generate.too_old() or [])) == is_old
    assert asked["abc"] == generate.MEASURED


def test_changes_are_counted_by_the_paths_that_a_commit_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        argv = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    commits = []
    for name in ("code", "text", "code", "code"):
        with (tmp_path / name).open("a") as file:
            file.write("line\n")
        git("add", "-A")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "--short", "HEAD"))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert [provenance.changes_since(commit, "code") for commit in commits] == [2, 2, 1, 0]
    assert provenance.changes_since(commits[0] + provenance.DIRTY, "code") is None
    assert provenance.changes_since("0123456", "code") is None and provenance.changes_since("", "code") is None
    assert [provenance.has_file(commit, "text") for commit in (*commits, "0123456", "")] == [
        False,
        *[True] * 3,
        *[False] * 2,
    ]
    assert provenance.has_whole_history()
    monkeypatch.setattr(provenance, "ROOT", tmp_path / ".." / "nothing")
    assert not provenance.has_whole_history()


def test_a_pipeline_measured_before_its_own_transport_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the row of a step, below a table, and above a text."""
    monkeypatch.setattr(generate, "old", lambda: ["bench step-1.0", "gloo step-1.0"])
    rows = [row.split(" | ")[6] for row in generate.steps()[2:-2]]
    assert rows.count("Gloo") == 1 and rows.count("its own transport") == len(rows) - 1
    assert generate.bench("step-1.0", "loop")[-1].endswith("There `pipeline` sent through Gloo: `step-1.0`.")
    (line,) = generate.transports("step-1.0", "loop")
    assert line.endswith("of `step-1.0` (`pipeline` sent through Gloo) and `loop` (`pipeline` had its own transport).")


@pytest.mark.parametrize("with_transport", [True, False])
def test_a_part_with_a_pipeline_is_of_gloo_if_its_commit_has_no_transport(
    monkeypatch: pytest.MonkeyPatch, with_transport: bool
) -> None:
    parts = {"a": {"commit": "abc", "figures": [{"name": "ring/pipeline"}]}, "b": {"commit": "abc", "figures": []}}
    monkeypatch.setattr(generate, "has_whole_history", lambda: True)
    monkeypatch.setattr(generate, "has_file", lambda commit, path: with_transport)
    monkeypatch.setattr(generate, "bench_file", lambda: parts)
    found = [name for name in generate.too_old() or [] if name.startswith("gloo ")]
    assert found == ([] if with_transport else ["gloo a"]) and (ROOT / generate.TRANSPORT).is_file()


def test_a_mode_that_was_removed_is_named_as_such() -> None:
    name = "bytes of {}direct/bucket:2MiB/pipeline{} / least, gather/scatter, ring/bucket:2MiB/pipeline"
    assert generate._name({"name": name.format("", "")}) == name.format("", " (removed since)")


def test_an_old_figure_is_named_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "old", lambda: ["bench a", "sweeps b"])
    assert generate._age("bench", "b") == ""
    assert generate._age("bench", "a").endswith("changed the measured code.")
    assert generate._age("bench", "a", "b").endswith("changed the measured code: `a`.")


def test_measured_predictions_are_a_table_with_commits_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"nodes": 8, "rate": None, "delay": None, "speed": 1.0, "dilation": 1.0, "low": 1.0, "high": 2.0}
    point = {"mode": "ring", **place, "seconds": 1.02, "commit": "abc", "measured": 1.0, "missing": "", "busy": False}
    slow = point | {"rate": 5e7, "delay": 0.01, "speed": 10.0, "busy": True}
    refused = point | {"mode": "tree", "measured": None, "missing": "a step would take 90 s"}
    of = {
        **{"model": "vgg11", "batch_per_rank": 8, "link": {"rate": "100mbit"}, "calibrated_on": 4},
        "calibration": [{"mode": "ring", "nodes": 4, "measured": 1.0, "error": 0.001}],
        "points": [each | {"measured_at": "def"} for each in (point, slow, refused)],
        **{"verdict": "1 points: median error 2.0 %", "commit": "def", "machine": "a processor (2 cores), Linux 6.1"},
    }
    monkeypatch.setattr(generate, "predict_files", lambda: {"vgg11": of})
    text = "\n".join(generate.predictions())
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert ["`ring`", "8", "100mbit", "1", "1.020", "1.000", "+2.0 %"] in cells
    assert ["`ring`", "8", "50mbit, delay 10ms, compute 10 x faster", "1", "1.020", "1.000", "+2.0 % *"] in cells
    assert "- tree on 8 nodes: a step would take 90 s" in text and "`ring` +0.1 %" in text
    assert "Predicted at commit abc, measured at def, on a processor (2 cores), Linux 6.1." in text
    monkeypatch.setattr(generate, "predict_files", dict)
    assert generate.predictions() == generate.UNMEASURED


def test_no_error_of_a_prediction_is_typed_by_hand() -> None:
    section = text_of("docs/predict.md").partition("## Errors measured")[2].partition("\n## ")[0]
    assert not re.search(r"\d\.\d", generate.BLOCK.sub("", section))


def test_outcomes_of_the_soak_are_in_a_table_with_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = {"commit": "abc", "ok": 99, "of": 100, "most_seconds": 0.65, "left": 0, "missed": ["ok 99, promised 100"]}
    monkeypatch.setattr(generate, "soak_files", lambda: {"kill": kill})
    lines = generate.soak()
    assert lines[2].endswith("| 99 of 100, at most 0.65 s, missed: ok 99, promised 100 |")
    assert sum("not counted yet" in line for line in lines) == len(generate.SOAK_PARTS) - 1
    assert lines[-1].startswith("Counted at commit abc: `kill`.")


def figure(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "low": None, "high": None, "detail": "", "met": True} | more


def test_a_new_part_gets_rows_limits_and_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [
        figure("step of a / b", 1.23456, high=1.2, met=False),
        figure("bytes | all", 0.5, low=0.4, high=0.6),
        figure("tiny", 1e-13),
        figure("runs", 5, low=5),
    ]
    parts = {
        "models-a": {"commit": "abc", "load": 0.25, "figures": figures},
        "models-b": {"commit": "abc", "figures": []},
    }
    monkeypatch.setattr(generate, "bench_file", lambda: parts)
    monkeypatch.setattr(generate, "PARTS", parts)
    assert generate.bench("models") == [
        "| figure | measured | limit |",
        "| --- | ---: | ---: |",
        "| step of a / b | 1.235 (missed) | <= 1.2 |",
        "| bytes / all | 0.500 | 0.4 to 0.6 |",
        "| tiny | 1.0e-13 |  |",
        "| runs | 5 | >= 5 |",
        "",
        "2 of 3 limits are met. Measured at commit abc: `models-a` (load 0.25 before), `models-b`.",
    ]


def test_what_is_not_measured_is_named_below_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = {"commit": "abc", "figures": [figure("bytes", 1.0)]}
    monkeypatch.setattr(generate, "old", list)
    monkeypatch.setattr(generate, "bench_file", lambda: {"loop": loop, "attach-cost": loop})
    assert generate.bench("loop", "waiting")[-1] == "Measured at commit abc: `loop`. Not measured yet: `waiting`."
    assert generate.bench("attach")[-1].endswith(" Not measured yet: `attach-ddp`, `attach-instead`.")
    assert generate.bench("loop")[-1] == "Measured at commit abc: `loop`."
    assert generate.bench("waiting") == generate.UNMEASURED
    monkeypatch.setattr(generate, "experiment_files", lambda: [Path("newer.toml"), Path("wan.toml"), Path("new.toml")])
    assert generate.sweeps()[-1] == "Without records yet (`make measure` makes them): `new`, `newer`."


def test_a_grid_has_its_limits_once_if_columns_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate.GRIDS, "new", r"(?P<row>\w+) at (?P<column>\w+)")

    def grid(*figures: dict[str, Any]) -> list[str]:
        monkeypatch.setattr(generate, "bench_file", lambda: {"new": {"commit": "abc", "figures": list(figures)}})
        lines: list[str] = generate.bench("new")
        return lines[:-2]

    one = [figure(f"{row} at {rate}", 1.0, high=2.0) for row in ("a", "b") for rate in ("slow", "fast")]
    assert grid(*one, figure("no cell", 3.0)) == [
        "| | slow | fast |",
        "| --- | ---: | ---: |",
        "| a | 1.000 | 1.000 |",
        "| b | 1.000 | 1.000 |",
        "| limit | <= 2 | <= 2 |",
    ]
    several = [figure("a at slow", 1.0, high=2.0), figure("b at slow", 3.0, high=2.5, met=False)]
    assert grid(*several)[2:] == ["| a | 1.000 (limit <= 2) |", "| b | 3.000 (limit <= 2.5, missed) |"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- begin bench loop (made by `make docs`) -->\n<!-- end bench lopp -->\n", "Restore its marks"),
        ("<!-- begin bench loop -->\n<!-- end bench loop -->\n", "Restore its marks"),
        ("<!-- begin guess (made by `make docs`) -->\n<!-- end guess -->\n", "nothing makes 'guess'"),
        ("<!-- begin bench lo (made by `make docs`) -->\n<!-- end bench lo -->\n", "make bench has no part 'lo'"),
    ],
)
def test_damaged_marks_and_unknown_parts_are_refused(text: str, says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        generate.page("x.md", text)
