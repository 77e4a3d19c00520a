"""Every error that a model can raise becomes a message of ours; no words of pydantic reach the user."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import testbed.results
import testbed.spec
from testbed.results.records import Record, read
from testbed.spec.base import RULES, Spec, damage, example_of, table_of
from testbed.spec.errors import SpecError
from testbed.spec.experiment import Experiment
from testbed.spec.inventory import HostNode, Inventory
from testbed.spec.link import Link
from testbed.spec.run import DataSpec, NodeOverride, NodeSpec, OptimizerSpec, RunSpec
from testbed.spec.words import Place, reading

for package in (testbed.spec, testbed.results):
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def subclasses(kind: type[Spec]) -> Iterator[type[Spec]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


MODELS = sorted((each for each in subclasses(Spec) if each.__module__.startswith("testbed.")), key=lambda m: m.__name__)
WRITTEN_BY_PEOPLE = [RunSpec, DataSpec, OptimizerSpec, NodeSpec, NodeOverride, Link, Experiment, HostNode, Inventory]
PHRASES = (
    "field required",
    "input should be",
    "should match pattern",
    "should have at least",
    "should have at most",
    "after validation",
    "valid tuple",
    "valid integer",
    "valid number",
    "valid string",
    "unable to parse",
    "extra inputs",
    "value error",
    "validation error",
    "pydantic",
)
WRONG: list[Any] = [None, True, "text", "", "x" * 10_000, "é\n", "9" * 5000, "1e999"]
WRONG += [-1, 0, 10**30, 1.5, math.nan, math.inf]
WRONG += [[], [[]], ["x"], [None], [1] * 300, [{}], [{"x": 1}] * 300, {}, {"x": 1}, {"x": {"x": 1}}, {"x": []}, {5: 1}]
WRONG += [b"bytes", b"\xff", object()]


def wrong_inputs(model: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Each field with each wrong value, each field missing, and a key that is not known."""
    yield {}
    yield {"unknown": 1}
    for name, field in model.model_fields.items():
        yield from ({field.alias or name: value} for value in WRONG)


def errors_of(model: type[BaseModel], values: Any) -> list[Any]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        return list(error.errors())
    return []


def check(message: str, errors: list[Any]) -> None:
    """The message has no text of pydantic: none of the known phrases, and none of what it says about these errors."""
    text = message.lower()
    assert [phrase for phrase in PHRASES if phrase in text] == [], message
    own = [item["msg"] for item in errors if item["type"] != "value_error"]
    assert [each for each in own if each.lower() in text] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_words_of_pydantic_reach_the_user(model: type[Spec]) -> None:
    refused = 0
    for values in wrong_inputs(model):
        errors = errors_of(model, values)
        for place in Place if errors else ():
            where = "a.toml" if place is Place.FILE else ""
            with pytest.raises(SpecError) as refusal, reading(place):
                model.load(values, where)
            check(str(refusal.value), errors)
            refused += 1
        if errors:
            with pytest.raises(SpecError, match=r"^summary\.json: damaged \(.*\)\. Run it again\.$") as refusal:
                model.load_written(values, "summary.json")
            check(str(refusal.value), errors)
    assert refused > 20


def test_every_type_of_error_that_the_models_raise_has_a_sentence() -> None:
    found = {item["type"] for model in MODELS for values in wrong_inputs(model) for item in errors_of(model, values)}
    found |= {item["type"] for line in wrong_lines() if (error := error_of_line(line)) for item in error.errors()}
    assert len(found) > 20
    assert found - {"value_error", "extra_forbidden"} <= set(RULES)
    assert set(RULES) <= found, "a sentence that nothing raises"


# --- records ---------------------------------------------------------------------------------------------------------

RECORD: TypeAdapter[Any] = read.__globals__["_RECORD"]


def wrong_lines() -> Iterator[str]:
    """Lines of rankN.jsonl: no JSON, no record, an unknown kind, and each key of each kind with each wrong value."""
    yield from ("", "{", "[]", "5", "null", "{}", '{"kind": "stop"}', '{"kind": 5}')
    for kind in get_args(Record):
        name = kind.__dataclass_fields__["kind"].default
        yield json.dumps({"kind": name})
        for each in fields(kind):
            for value in WRONG:
                try:
                    yield json.dumps({"kind": name} | {each.name: value})
                except TypeError:  # no JSON can hold it
                    continue


def error_of_line(line: str) -> ValidationError | None:
    try:
        RECORD.validate_json(line, strict=True)
    except ValidationError as error:
        return error
    return None


def test_a_damaged_record_is_refused_in_words_of_ours() -> None:
    refused = [error for line in wrong_lines() if (error := error_of_line(line))]
    assert len(refused) > 100
    for error in refused:
        check(damage(error), error.errors())


# --- the way out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", WRITTEN_BY_PEOPLE, ids=lambda model: model.__name__)
def test_the_value_of_the_way_out_is_accepted(model: type[Spec]) -> None:
    for name, field in model.model_fields.items():
        if table_of(field) is None:
            key = field.alias or name
            wrong = [item for item in errors_of(model, {key: example_of(field)}) if item["loc"][:1] == (key,)]
            assert wrong == [], f"{name} = {example_of(field)!r}"


@pytest.mark.parametrize("model", WRITTEN_BY_PEOPLE, ids=lambda model: model.__name__)
def test_a_pattern_has_a_rule_that_people_can_read(model: type[Spec]) -> None:
    patterns = {
        name: field
        for name, field in model.model_fields.items()
        if any(getattr(each, "pattern", None) for each in field.metadata)
    }
    assert [name for name, field in patterns.items() if not field.description] == []


SENTENCES = {
    "a missing key": (
        Experiment,
        {"name": "e"},
        "a.toml: title: is missing. Add e.g. title = 'What does a ring cost?'.",
    ),
    "a missing list": (
        Inventory,
        {},
        "a.toml: nodes: is missing. Add e.g. nodes = [{name = 'node0', address = '192.0.2.11'}].",
    ),
    "an empty axis": (
        Experiment,
        {"name": "e", "title": "?", "axes": {"mode": []}},
        "a.toml: axes.mode = []: must have at least 1 entry, and has 0. Write e.g. axes = {mode = ['ring', 'ddp']}.",
    ),
    "a missing key of a node": (
        Inventory,
        {"nodes": [{"name": "a"}]},
        "a.toml: nodes.0.address: is missing. Add e.g. nodes.0.address = '192.0.2.11'.",
    ),
    "a number for a list": (
        RunSpec,
        {"data": {"shares": 5}},
        "a.toml: data.shares = 5: must be a list. Write e.g. data.shares = [96, 64, 64, 32].",
    ),
    "a word in a list of numbers": (
        RunSpec,
        {"data": {"shares": ["many"]}},
        "a.toml: data.shares.0 = 'many': must be a whole number. Write e.g. data.shares = [96, 64, 64, 32].",
    ),
    "a word for a table": (
        RunSpec,
        {"link": "fast"},
        "a.toml: link = 'fast': must be a table of keys and values. Set its keys instead: "
        "link.delay, link.jitter, link.loss, link.queue, link.rate, link.segment.",
    ),
    "a number for a mode": (
        RunSpec,
        {"mode": 5},
        "a.toml: mode = 5: must be text. Write e.g. ring/bucket:2MiB.",
    ),
    "a similar key": (RunSpec, {"bacth": 8}, " Did you mean batch?"),
    "a word of a list": (
        RunSpec,
        {"dtype": "half"},
        "a.toml: dtype = 'half': must be one of 'float32' or 'float64'. Write e.g. dtype = 'float32'.",
    ),
    "a name with a slash": (
        RunSpec,
        {"name": "a/b"},
        "a.toml: name = 'a/b': must be letters, digits, _, . and -, beginning with a letter or digit, "
        "at most 128 characters. Write e.g. name = 'run'.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_message_has_the_value_the_rule_and_the_way_out(case: str) -> None:
    model, values, sentence = SENTENCES[case]
    with pytest.raises(SpecError) as refusal:
        model.load(values, "a.toml")
    assert str(refusal.value).endswith(sentence) if sentence.startswith(" ") else str(refusal.value) == sentence
