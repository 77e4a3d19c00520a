"""Spec, the base class of all configuration: frozen, no unknown keys, one sentence for each wrong value.

Errors of pydantic become our messages: the value, the rule, the way out. `RULES` has a sentence for every type of error
that our models can raise; tests/unit/spec/test_base.py checks this by wrong values for every field. No text of pydantic
is printed. The way out shows an accepted value: the first of a field's `examples`, else its default, else a value made
from its type and limits. The `description` of a field is the rule for its pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from testbed.spec.errors import SpecError, did_you_mean, one_line, quote
from testbed.spec.words import Place, reading, refuse_setting, setting

_WHOLE, _NUMBER, _TEXT, _LIST = "must be a whole number", "must be a number", "must be text", "must be a list"
_TABLE, _BOOL, _JSON = "must be a table of keys and values", "must be true or false", "is not JSON"
RULES = {  # type of pydantic's error: the rule; words in braces are from the error's context
    "missing": "is missing",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "has too many digits",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "string_type": _TEXT,
    "string_unicode": _TEXT,
    "invalid_key": "must have text as keys",
    "string_pattern_mismatch": "must be {description}",
    "literal_error": "must be one of {expected}",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "dataclass_type": _TABLE,
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length}, and has {actual_length}",
    "too_long": "must have at most {max_length}, and has {actual_length}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "json_invalid": _JSON,
    "union_tag_invalid": "must have a kind, one of {expected_tags}",
    "union_tag_not_found": "must have a kind",
}
_CONTAINERS = (dict, tuple, list)
_OTHER = "cannot be used here"  # the rule for a type that has no row in RULES; a test shows that no field needs it


@dataclass(frozen=True)
class Problem:
    """One wrong value. If a rule connects several values, `text` is the whole message and replaces the other fields."""

    key: str
    value: Any
    rule: str
    way_out: str
    shown: bool = True  # whether the message shows the value; False e.g. for a missing key
    text: str = ""


def sentences(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a sentence for each wrong value, which names the setting as the reader writes it (words.py)."""
    return " ".join(_sentence(problem) for problem in _problems(error, model))


def damage(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return the first problem of a file that the testbed has written. There is no way out: users do not edit it."""
    problem = _problems(error, model)[0]
    if problem.text:
        return one_line(problem.text)
    value = f" = {quote(problem.value)}" if problem.shown else ""
    return one_line(f"{problem.key}{value}: {problem.rule}".removeprefix(": "))


def _sentence(problem: Problem) -> str:
    if problem.text:
        return problem.text if problem.text.endswith((".", "?")) else f"{problem.text}."
    if not problem.shown:
        return f"{one_line(problem.key) or 'its content'}: {problem.rule}. {problem.way_out}"
    return str(refuse_setting(one_line(problem.key), problem.value, problem.rule, problem.way_out))


def _problems(error: ValidationError, model: type[BaseModel] | None) -> list[Problem]:
    items = error.errors(include_url=False)
    # pydantic drops a list's wrong entries before it checks the length, so a list with wrong entries may be reported
    # as too short as well. Only its entries get a sentence then.
    wrong_inside = {item["loc"][:length] for item in items for length in range(len(item["loc"]))}
    return [_problem(model, each) for each in items if each["type"] != "too_short" or each["loc"] not in wrong_inside]


def _problem(model: type[BaseModel] | None, item: Any) -> Problem:
    kind, loc, value, context = item["type"], item["loc"], item["input"], item.get("ctx", {})
    key = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return Problem(key, value, "", "", text=_unknown_key(model, loc))
    field_key, field = _field(model, loc)
    if kind == "value_error":
        cause = context["error"].args[0]
        if isinstance(cause, SpecError) and cause.rule:  # the rule of this field alone
            return Problem(field_key, value, cause.rule, cause.way_out)
        return Problem(key, value, "", "", text=str(cause))
    description = (field.description if field else None) or "text of another form"
    words = {name: f"{each:g}" for name, each in context.items() if isinstance(each, float)}
    words |= {name: _entries(context[name]) for name in ("min_length", "max_length") if name in context}
    rule = RULES.get(kind, _OTHER).format_map(context | words | {"description": description})
    shown = kind != "missing" and bool(key) and not isinstance(value, dict)
    return Problem(key, value, rule, _way_out(kind, field_key, field), shown=shown)


def _entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _way_out(kind: str, key: str, field: FieldInfo | None) -> str:
    if field is None:
        return "Give another value."
    if (table := table_of(field)) is not None:
        return f"Set its keys instead: {', '.join(f'{key}.{name}' for name in sorted(table.model_fields))}."
    if kind == "too_long":
        return "Leave some out."
    verb = "Add" if kind == "missing" else "Write"
    return f"{verb} e.g. {setting(key, example_of(field))}."


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the spec class of a field that is a single table, such as `Link` or `Link | None`; else None."""
    return None if get_origin(field.annotation) in _CONTAINERS else _spec_in(field.annotation)


def example_of(field: FieldInfo) -> Any:
    """Return a value that the field accepts: its first example, its default, or a value made from its type."""
    if field.examples:
        return field.examples[0]
    if field.default is not None and not field.is_required() and not isinstance(field.default, BaseModel):
        return field.default
    (kind, *_) = [each for each in (get_args(field.annotation) or [field.annotation]) if each is not NoneType]
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)[0]
    made: dict[Any, Any] = {int: 1, float: 0.5, bool: True, str: "text"}
    return made.get(kind, [])


def _unknown_key(model: type[BaseModel] | None, loc: tuple[Any, ...]) -> str:
    """Return a message that names an unknown key, the known keys of its table, and the most similar known key."""
    known = sorted(field.alias or name for name, field in _table(model, loc[:-1]).model_fields.items()) if model else []
    hint = did_you_mean(str(loc[-1]), known)
    return f"unknown key {quote('.'.join(map(str, loc)))}; known keys: {', '.join(known)}.{hint}"


def _field(model: type[BaseModel] | None, loc: tuple[Any, ...]) -> tuple[str, FieldInfo | None]:
    """Return the key of the field that contains the wrong value, and the field: data.shares for data.shares.0."""
    names: list[str] = []
    found: FieldInfo | None = None
    parts = list(loc)
    while model is not None and parts:
        part = parts.pop(0)
        found = next((each for name, each in model.model_fields.items() if part in (name, each.alias)), None)
        if found is None:
            return ".".join(map(str, loc)), None
        names.append(str(part))
        model = _spec_in(found.annotation)
        if model is not None and parts and get_origin(found.annotation) in _CONTAINERS:
            names.append(str(parts.pop(0)))  # a key of a dict of specs, or an index of a tuple of them
    return ".".join(names), found


def _table(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """Return the spec class of the table at `loc`."""
    _, field = _field(model, loc)
    return (_spec_in(field.annotation) if field else None) or model


def _spec_in(annotation: Any) -> type[BaseModel] | None:
    """Return the spec class in the type of a field, e.g. Link in `Link | None` or `dict[str, Link]`; else None."""
    kinds = [*get_args(annotation), annotation]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


Value = TypeVar("Value")
Result = TypeVar("Result")


class Spec(BaseModel):
    """Frozen configuration; build it with `load`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls, values: dict[str, Any], where: str) -> Self:
        """Validate `values` and return the spec. Raises SpecError with a sentence for each wrong value.

        `where` is the file that the message names; if it is empty, the message names flags or variables instead.
        """
        with reading(Place.FILE) if where else nullcontext():
            try:
                return cls.model_validate(values)
            except ValidationError as error:
                text = sentences(error, cls)
                raise SpecError(f"{where}: {text}" if where else text) from None

    @classmethod
    def load_written(cls, values: Any, path: object) -> Self:
        """Validate the content of a file that the testbed has written. Raises SpecError if the file is damaged."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(f"{path}: damaged ({damage(error, cls)}). Run it again.") from None


def validator(check: Callable[[Value], Result]) -> Callable[[Value], Result]:
    """Return a function that calls `check` and raises ValueError for its SpecError, as pydantic requires."""

    def validate(value: Value) -> Result:
        try:
            return check(value)
        except SpecError as error:
            raise ValueError(error) from None

    return validate
