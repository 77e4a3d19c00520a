"""Spec, the base class of all configuration: frozen, no unknown keys, one sentence for each wrong value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.spec.errors import SpecError
from testbed.spec.validation import damage, sentences
from testbed.spec.words import Place, reading

Value = TypeVar("Value")
Result = TypeVar("Result")


class Spec(BaseModel):
    """Frozen configuration; build it with `load`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls, values: dict[str, Any], where: str) -> Self:
        """Validate `values` and return the spec. Raises SpecError with a sentence for each wrong value.

        `where` is the file that the message names; without it, the values are those of the command line or of
        variables, and the message names them so.
        """
        with reading(Place.FILE) if where else nullcontext():
            try:
                return cls.model_validate(values)
            except ValidationError as error:
                text = sentences(error, cls)
                raise SpecError(f"{where}: {text}" if where else text) from None

    @classmethod
    def load_written(cls, values: Any, path: object) -> Self:
        """Validate the content of a file that the testbed has written. Raises SpecError if it is damaged."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(f"{path}: damaged ({damage(error, cls)}). Run it again.") from None


def validator(check: Callable[[Value], Result]) -> Callable[[Value], Result]:
    """Return `check` for pydantic, which needs a ValueError where `check` raises SpecError."""

    def validate(value: Value) -> Result:
        try:
            return check(value)
        except SpecError as error:
            raise ValueError(error) from None

    return validate
