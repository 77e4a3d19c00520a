"""Assignment: an instructor's file of demands on training scripts, in parts, with points. `testbed grade` reads it.

    [[parts]]
    name = "2b"
    argv = ["python", "part2b.py", "--rank", "{rank}"]
    [[parts.demands]]
    kind = "gradients"
    points = 4

To add a kind of demand, add a row to DEMANDS here and a function to control/grading/demands.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from testbed.spec.base import Spec, validator
from testbed.spec.errors import SpecError, refuse
from testbed.spec.experiment import read_toml
from testbed.spec.run import FOLDER_NAME
from testbed.spec.script import Limits, check_placeholders
from testbed.spec.units import format_rate, parse_rate

OUTSIDE, RECORDS, BOTH = "outside", "records", "records and outside"


@dataclass(frozen=True, kw_only=True)
class DemandKind:
    """A row of DEMANDS. `rests_on` is the evidence: OUTSIDE the script's process, in its RECORDS, or BOTH."""

    does: str
    rests_on: str
    needs: tuple[str, ...] = ()  # keys that such a demand must have
    may: tuple[str, ...] = ()  # further keys that it may have


DEMANDS: dict[str, DemandKind] = {
    "runs": DemandKind(does="the script ends with code 0 on every node, in time, after its steps", rests_on=BOTH),
    "collectives": DemandKind(
        does="every step calls the required operations, and none of the forbidden ones is called",
        rests_on=BOTH,
        may=("required", "forbidden"),
    ),
    "gradients": DemandKind(does="the optimizer gets the mean of all ranks' gradients", rests_on=RECORDS),
    "replicas": DemandKind(does="all ranks have equal parameters, from the start on", rests_on=RECORDS),
    "data": DemandKind(does="no two ranks get the same images", rests_on=RECORDS),
    "batch": DemandKind(does="all ranks together get so many images a step", rests_on=RECORDS, needs=("images",)),
    "bytes": DemandKind(
        does="rank 0 and each other rank send so many times the gradient's bytes a step",
        rests_on=OUTSIDE,
        needs=("rank0", "others"),
    ),
    "speed": DemandKind(
        does="a step is not slower than in another part, by intervals that do not overlap",
        rests_on=RECORDS,  # the time of the whole run, which is taken outside, has imports and data in it
        needs=("part",),
    ),
    "loss": DemandKind(
        does="the first step has the loss that another part's first step has",
        rests_on=RECORDS,
        needs=("part",),
        may=("tolerance",),
    ),
}
OWN_KEYS = ("required", "forbidden", "images", "rank0", "others", "part", "tolerance")  # keys that only some kinds have


Rate = Annotated[
    int,
    BeforeValidator(validator(lambda value: parse_rate(value) if isinstance(value, str) else value)),
    PlainSerializer(format_rate),
    Field(gt=0),
]
Band = Annotated[tuple[float, float], Field(examples=[[1.2, 1.6]])]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description=FOLDER_NAME.format(64), examples=["2a"]),
]


class Demand(Spec):
    """One demand: its kind, its points, and the keys that the kind has."""

    kind: Literal["runs", "collectives", "gradients", "replicas", "data", "batch", "bytes", "speed", "loss"]
    points: float = Field(ge=0, le=1000, examples=[2])
    required: tuple[str, ...] = Field(default=(), examples=[["gather", "scatter"]])  # at least once a step
    forbidden: tuple[str, ...] = Field(default=(), examples=[["all_reduce"]])  # operations, or wrappers such as DDP
    images: int | None = Field(default=None, gt=0, examples=[256])
    rank0: Band | None = Field(default=None, examples=[[1.2, 1.6]])  # lowest and highest
    others: Band | None = Field(default=None, examples=[[1.2, 1.6]])
    part: str = Field(default="", examples=["1"])  # the part that is compared with
    tolerance: float = Field(default=1e-4, gt=0, le=1)  # relative

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        validator(_check_keys)(self)
        return self


def _check_keys(demand: Demand) -> Demand:
    row = DEMANDS[demand.kind]
    given = {key for key in OWN_KEYS if key in demand.model_fields_set}
    if missing := [key for key in row.needs if key not in given]:
        field = Demand.model_fields[missing[0]]
        example = f"Add e.g. {missing[0]} = {(field.examples or [field.default])[0]!r}."
        raise refuse("demand", demand.kind, f"needs the key {missing[0]}", example)
    if extra := sorted(given - {*row.needs, *row.may}):
        known = ", ".join((*row.needs, *row.may)) or "no key but points"
        raise refuse("demand", demand.kind, f"has no key {extra[0]}", f"It takes {known}.")
    if row.may == ("required", "forbidden") and not given:
        raise refuse("demand", demand.kind, "demands nothing", 'Add e.g. required = ["all_reduce"].')
    for key, band in (("rank0", demand.rank0), ("others", demand.others)):
        if band is not None and not 0 <= band[0] < band[1]:
            raise refuse(key, list(band), "must be the lowest and the highest value", "Write e.g. [1.2, 1.6].")
    return demand


class Part(Spec):
    """One part of the assignment: a script, its command line, and the demands on it."""

    name: Name
    title: str = ""
    file: str = Field(  # the submitted script; if a submission lacks it, the part is not run
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$",
        description="the name of a file in the submission's folder",
        examples=["part2a.py"],
    )
    argv: tuple[str, ...] = Field(min_length=1, max_length=1000, examples=[["python", "part1.py", "--rank", "{rank}"]])
    nodes: int | None = Field(default=None, ge=1, le=256, examples=[4])  # None: the assignment's
    steps: int | None = Field(default=None, gt=0, examples=[40])
    rate: Rate | None = Field(default=None, examples=["200mbit"])
    demands: tuple[Demand, ...] = Field(min_length=1, examples=[[{"kind": "runs", "points": 2}]])

    @field_validator("argv")
    @classmethod
    def _known_placeholders(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        return validator(check_placeholders)(argv)


class Assignment(Spec):
    """The whole file. `nodes`, `steps` and `rate` are the defaults for all parts."""

    name: Name
    title: str = Field(examples=["Data-parallel training in four ways"])
    nodes: int = Field(default=4, ge=1, le=256)
    steps: int = Field(default=10, ge=3)
    rate: Rate | None = Field(default=None, examples=["200mbit"])
    parameters: int | None = Field(default=None, gt=0, examples=[101770])  # numbers (float32) in the model
    # a folder beside the assignment's file; its files are copied into every submission and replace files there
    given: str = Field(
        default="", pattern=r"^[A-Za-z0-9_-]{0,64}$", description="the name of a folder", examples=["given"]
    )
    limits: Limits = Limits()
    parts: tuple[Part, ...] = Field(min_length=1, examples=[[]])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a TOML file; its stem is the assignment's name. Raises SpecError."""
        return cls.load({"name": path.stem} | read_toml(path), str(path))

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        validator(_check_parts)(self)
        return self

    @property
    def points(self) -> float:
        return sum(demand.points for part in self.parts for demand in part.demands)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient; 0 if `parameters` is not given."""
        return 4 * (self.parameters or 0)

    def complete(self, part: Part) -> Part:
        """Return the part with nodes, steps and rate; the assignment's values replace missing ones."""
        own = {"nodes": part.nodes or self.nodes, "steps": part.steps or self.steps, "rate": part.rate or self.rate}
        return part.model_copy(update=own)


def _check_parts(assignment: Assignment) -> Assignment:
    names = [part.name for part in assignment.parts]
    for part in assignment.parts:
        if names.count(part.name) > 1:
            raise SpecError(f"part {part.name!r}: is defined twice. Give every part a name of its own.")
        for demand in part.demands:
            what = f"{demand.kind} of part {part.name!r}"
            if demand.part and demand.part not in names:
                raise SpecError(f"{what}: there is no part {demand.part!r}. Known: {', '.join(names)}.")
            if demand.kind == "bytes" and not assignment.parameters:
                raise SpecError(f"{what}: the size of the model is needed. Add e.g. parameters = 101770.")
    return assignment
