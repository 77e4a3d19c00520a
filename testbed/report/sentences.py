"""The register of rules: functions that derive a sentence from numbers, each with the steps and cells that it needs.

`@states(steps=3, cells=2, otherwise="...")` registers a rule. Before the rule is called, cells with fewer steps are
left out of its positional arguments. If fewer cells remain than the rule needs, the rule is not called, and the result
is `otherwise`: a title without a claim, or an empty text.

A rule returns a Sentence; figures, verdicts and claims raise TypeError for any other text. So no sentence of a rule
that is not registered gets on the page. tests/unit/report/test_sentences.py calls every registered rule with runs that
support no claim: one step, one mode, a rising loss, equal values, invalid and faulted runs, two substrates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

COMPARE_STEPS = 3  # the fewest steps of a median that is compared with another
STEADY_STEPS = 10  # the fewest steps for a sentence with "nine of ten"

P = ParamSpec("P")
R = TypeVar("R")


class Sentence(str):
    """Text that the rule `rule` derived from numbers. `claims` is False for a text without a claim about numbers."""

    rule: str
    claims: bool

    def __new__(cls, text: str, rule: str = "", claims: bool = True) -> Sentence:
        made = super().__new__(cls, text)
        made.rule, made.claims = rule, claims and bool(text)
        return made

    def ended(self) -> Sentence:
        """Return the same Sentence with a full stop."""
        return Sentence(f"{self}.", self.rule, self.claims)


def check_sentence(text: str) -> Sentence:
    """Return `text`. Raise TypeError if no registered rule made it."""
    if not isinstance(text, Sentence):
        raise TypeError(f"{text!r} was made by no registered rule. Decorate the function that made it with @states.")
    return text


@dataclass(frozen=True)
class Tile:
    """One number in large type, and its meaning."""

    figure: str
    text: str


@dataclass(frozen=True)
class Check:
    """One check of numbers against each other. `ok` is None without numbers to compare, or if the result is open."""

    ok: bool | None
    text: str


@dataclass(frozen=True)
class Claim:
    """One published finding: reproduced ("yes"), not reproduced ("no"), or not decided by these runs ("open")."""

    state: str
    text: str

    @property
    def word(self) -> str:
        return {"yes": "Reproduced:", "no": "Not reproduced:", "open": "Open:"}[self.state]


@dataclass(frozen=True)
class Rule:
    """The steps and cells that a rule needs, and its result without them."""

    name: str
    steps: int  # fewest of every cell that the rule uses
    cells: int  # fewest
    otherwise: Any  # result if there are fewer


RULES: dict[str, Rule] = {}


def states(*, steps: int, cells: int = 1, otherwise: Any = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a rule and makes its results Sentences. The arguments are fields of Rule."""

    def register(make: Callable[P, R]) -> Callable[P, R]:
        rule = Rule(f"{make.__module__.rpartition('.')[2]}.{make.__name__}", steps, cells, otherwise)
        if rule.name in RULES:
            raise ValueError(f"the rule {rule.name} is registered twice. Give one of them another name.")
        RULES[rule.name] = rule

        @functools.wraps(make)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            fitting = [_fit(value, rule) for value in args]
            if any(value is _TOO_FEW for value in fitting):
                return _marked(rule.otherwise, rule.name, claims=False)  # type: ignore[no-any-return]
            return _marked(make(*fitting, **kwargs), rule.name)  # type: ignore[no-any-return]

        return checked

    return register


_TOO_FEW = object()  # takes the place of an argument with too few cells or steps


@runtime_checkable
class _Counted(Protocol):
    """A cell with its number of steps."""

    @property
    def n(self) -> int: ...


@runtime_checkable
class _HasCells(Protocol):
    """A part of the report that has cells."""

    cells: list[Any]

    def with_cells(self, cells: list[Any]) -> Any: ...


def _fit(value: Any, rule: Rule) -> Any:
    """Return an argument without the cells that have too few steps; _TOO_FEW if too few cells remain."""
    if isinstance(value, _Counted):
        return value if _fits(value, rule) else _TOO_FEW
    if isinstance(value, _HasCells):
        cells = [cell for cell in value.cells if _fits(cell, rule)]
        return value.with_cells(cells) if len(cells) >= rule.cells else _TOO_FEW
    if isinstance(value, Mapping):
        curves = {key: [point for point in curve if _fits(point, rule)] for key, curve in value.items()}
        return _at_least({key: curve for key, curve in curves.items() if len(curve) > 1}, 1)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _fit_sequence(value, rule)
    return value


def _fit_sequence(values: Sequence[Any], rule: Rule) -> Any:
    if all(isinstance(value, _Counted) for value in values):
        return _at_least([value for value in values if _fits(value, rule)], rule.cells)
    if all(isinstance(value, Mapping) for value in values):  # one spec in several places
        groups = [{key: cell for key, cell in each.items() if _fits(cell, rule)} for each in values]
        return _at_least([group for group in groups if len(group) > 1], 1)
    return values


def _fits(value: Any, rule: Rule) -> bool:
    """Return True for a cell with enough steps, and for a point of a curve, (value, cell), with such a cell."""
    if isinstance(value, tuple):
        return all(_fits(each, rule) for each in value)
    return not isinstance(value, _Counted) or value.n >= rule.steps


def _at_least(values: Any, least: int) -> Any:
    return values if len(values) >= least else _TOO_FEW


def _marked(result: Any, rule: str, claims: bool = True) -> Any:
    """Return the result of a rule with every text in it as a Sentence."""
    if isinstance(result, Sentence) and not result.claims:
        return result
    if isinstance(result, str):
        return Sentence(result, rule, claims)
    if isinstance(result, list):
        return [_marked(each, rule, claims) for each in result]
    if isinstance(result, Tile | Check | Claim):
        return replace(result, text=_marked(result.text, rule, claims))
    return result
