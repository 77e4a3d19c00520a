"""An instructor's file of demands: what it may say, and the sentence for what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.spec.errors import SpecError
from testbed.spec.grading import DEMANDS, OWN_KEYS, Assignment, Demand

COURSE = Path(__file__).parents[3] / "course"
RUNS = {"kind": "runs", "points": 1}


def assignment(*demands: dict[str, Any], **keys: Any) -> Assignment:
    part = {"name": "1", "file": "a.py", "argv": ["python", "a.py"], "demands": list(demands) or [RUNS]}
    return Assignment.load({"name": "a", "title": "t", "parts": [part]} | keys, "a.toml")


def test_the_assignment_of_the_course_has_four_parts_and_100_points() -> None:
    read = Assignment.read(COURSE / "assignment2.toml")
    assert [part.name for part in read.parts] == ["1", "2a", "2b", "3"] and read.points == 100
    used = {demand.kind for part in read.parts for demand in part.demands}
    assert used == set(DEMANDS), "every kind of demand is shown once"


def test_every_part_of_the_course_has_a_model_solution() -> None:
    files = {part.file for part in Assignment.read(COURSE / "assignment2.toml").parts}
    assert {path.name for path in (COURSE / "solutions" / "model").glob("*.py")} == files


def test_every_key_of_a_demand_belongs_to_a_kind() -> None:
    assert {key for row in DEMANDS.values() for key in (*row.needs, *row.may)} == set(OWN_KEYS)
    assert set(OWN_KEYS) | {"kind", "points"} == set(Demand.model_fields)


def test_a_part_has_the_values_of_the_assignment_unless_it_has_its_own() -> None:
    read = Assignment.read(COURSE / "assignment2.toml")
    first, second = (read.complete(part) for part in read.parts[:2])
    assert (first.nodes, second.nodes, second.steps, second.rate) == (1, 4, 10, 200_000_000)
    assert read.limits.memory == 1 << 30 and read.gradient_bytes == 4 * 101770


WRONG = {
    "an unknown kind": ([{"kind": "fast", "points": 1}], {}, "must be one of"),
    "a missing key": ([{"kind": "batch", "points": 1}], {}, "needs the key images. Add e.g. images = 256."),
    "a key of another kind": (
        [{"kind": "runs", "points": 1, "images": 3}],
        {},
        "has no key images. It takes no key but points.",
    ),
    "collectives without names": ([{"kind": "collectives", "points": 1}], {}, "demands nothing. Add e.g."),
    "a band the wrong way round": (
        [{"kind": "bytes", "points": 1, "rank0": [2, 1], "others": [1, 2]}],
        {"parameters": 10},
        "must be the lowest and the highest value. Write e.g. [1.2, 1.6].",
    ),
    "bytes without the model's size": (
        [{"kind": "bytes", "points": 1, "rank0": [1, 2], "others": [1, 2]}],
        {},
        "the size of the model is needed. Add e.g. parameters = 101770.",
    ),
    "a part that does not exist": ([{"kind": "loss", "points": 1, "part": "9"}], {}, "Known: 1."),
    "negative points": ([{"kind": "runs", "points": -1}], {}, "must be at least 0"),
    "a limit in no unit": ([RUNS], {"limits": {"memory": "much"}}, "needs a number and one of"),
    "a path for the given files": (
        [RUNS],
        {"given": "../etc"},
        "must be the name of a folder. Write e.g. given = 'given'.",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_has_a_sentence(case: tuple[list[dict[str, Any]], dict[str, Any], str]) -> None:
    demands, keys, sentence = case
    with pytest.raises(SpecError) as refusal:
        assignment(*demands, **keys)
    assert str(refusal.value).startswith("a.toml: ") and sentence in str(refusal.value), str(refusal.value)


def test_two_parts_of_one_name_and_an_unknown_placeholder_are_refused() -> None:
    part = {"name": "1", "file": "a.py", "argv": ["python", "a.py"], "demands": [RUNS]}
    with pytest.raises(SpecError, match="part '1': is defined twice"):
        Assignment.load({"name": "a", "title": "t", "parts": [part, part]}, "a.toml")
    with pytest.raises(SpecError, match=r"{node}.*is not known"):
        Assignment.load({"name": "a", "title": "t", "parts": [part | {"argv": ["python", "{node}"]}]}, "a.toml")
