"""Documents agree with the files that they are made from: rows in testbed/spec, figures in results/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs import generate

ROOT = Path(__file__).parents[2]
MEASURED = ("README.md", "docs/performance.md", "docs/results.md")


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
