"""Spec, the base class of all configuration: frozen, no unknown keys, one sentence for each wrong value."""

from __future__ import annotations

from typing import Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.spec.errors import SpecError, one_line, quote


class Spec(BaseModel):
    """Frozen configuration; build it with `load`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls, values: dict[str, Any], where: str) -> Self:
        """Validate `values` and return the spec. Raises SpecError with a sentence for each wrong value.

        `where` is the file that the message names.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            text = "; ".join(_sentence(cls, item) for item in error.errors())
            raise SpecError(f"{where}: {text}" if where else text) from None


def _sentence(cls: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {quote(key)}; known keys: {', '.join(_known_keys(cls, item['loc']))}"
    text: str = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" or not key:
        return text
    return f"{one_line(key)} = {quote(item['input'])}: {text[:1].lower()}{text[1:]}. Give another value"


def _known_keys(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Return the keys that are allowed in the table that contains the unknown key."""
    entry = False  # True if the next part is a key of a dict of specs, or an index of a tuple of them
    for part in loc[:-1]:
        if not entry:
            annotation = cls.model_fields[part].annotation
            cls = _spec_in(annotation)
        entry = not entry and get_origin(annotation) in (dict, tuple)
    return sorted(cls.model_fields)


def _spec_in(annotation: Any) -> type[BaseModel]:
    """The spec class in the type of a field: `Link`, `Link | None`, `dict[str, Link]` or `tuple[Link, ...]`."""
    kinds = [*get_args(annotation), annotation]
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
