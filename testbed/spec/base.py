"""What all specs share: frozen, no unknown keys, refused with a sentence instead of a traceback."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.spec.errors import SpecError, plain, shown


class Spec(BaseModel):
    """Frozen configuration; build it with `load` to get one-sentence refusals."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls, values: dict[str, Any], where: str) -> Self:
        """Validate `values`; `where` names the file in the refusal."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            text = "; ".join(_sentence(cls, item) for item in error.errors())
            raise SpecError(f"{where}: {text}" if where else text) from None


def _sentence(cls: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {shown(key)}; known here: {', '.join(_keys_beside(cls, item['loc']))}"
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" or not key:
        return text
    return f"{plain(key)} = {shown(item['input'])}: {text[:1].lower()}{text[1:]}. Give another value"


def _keys_beside(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys that are allowed where the unknown one stood."""
    for part in loc[:-1]:
        field = cls.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ["see the README"]
        cls = inner
    return sorted(cls.model_fields)
