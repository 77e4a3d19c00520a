"""profile.json: how long each layer of a model computes, recorded on one rank that exchanges nothing.

`testbed profile` writes it. Emulated compute replays it (rank/workload.py), and predictions use it. All times are in
seconds: medians over the recorded steps, or means under a CPU quota. A step takes

    data_s + zero_s + forward_s of all layers + loss_s + backward_s of all layers in reverse + optimizer_s
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from testbed.results.folder import read_bounded, write_whole
from testbed.spec.base import Spec
from testbed.spec.errors import SchemaError, SpecError, one_line

# Version of profile.json alone. It is raised if a key changes its meaning or is removed; a new key with a default does
# not raise it.
PROFILE_SCHEMA = 1
MAX_PROFILE_BYTES = 16 << 20  # a layer has about 150 bytes
MAX_LAYERS = 20_000
MAX_STEPS = 10_000
MAX_PARAMETER_BYTES = 1 << 40

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Size = Annotated[int, Field(gt=0, le=MAX_PARAMETER_BYTES)]


class ProfiledLayer(Spec):
    """One call of a layer: the time from the end of the layer before it to its own end, in each direction.

    A tensor that several layers use is in the `sizes` of the first of these layers in the forward pass, because its
    gradient is complete when the backward pass has reached this layer.
    """

    name: str = Field(max_length=400, examples=["features.0"])  # as the model names it; "" if it is the whole model
    # bytes of each trained parameter tensor of the layer, in the order in which the model registers them
    sizes: tuple[Size, ...] = Field(default=(), examples=[[6912, 256]])
    # shapes of the same tensors; empty: unknown
    shapes: tuple[tuple[Annotated[int, Field(gt=0)], ...], ...] = Field(default=(), examples=[[[64, 3, 3, 3], [64]]])
    forward_s: Seconds
    backward_s: Seconds  # until the gradients of its parameters are ready

    @property
    def gradient_bytes(self) -> int:
        return sum(self.sizes)

    @model_validator(mode="after")
    def _check_shapes(self) -> ProfiledLayer:
        if self.shapes and len(self.shapes) != len(self.sizes):
            raise ValueError(f"layer {self.name!r} has {len(self.sizes)} sizes and {len(self.shapes)} shapes")
        return self


class Profile(Spec):
    """The compute of one rank, layer by layer."""

    version: int = Field(default=PROFILE_SCHEMA, alias="schema")
    model: str = Field(max_length=400, examples=["vgg11"])
    dtype: str = Field(default="float32", pattern=r"^[a-z]{1,10}\d{1,3}$", description="a type such as float32")
    batch_per_rank: int = Field(gt=0)
    threads: int = Field(default=1, ge=1)
    cpus: float | None = Field(default=None, gt=0)  # CPU share of the recorded rank in cores; None: no limit
    optimizer: str = Field(default="sgd", max_length=100)  # name of the optimizer whose step took `optimizer_s`
    environment: dict[str, Any] = {}  # versions, kernel, processor: as in the start record of a run
    layers: tuple[ProfiledLayer, ...] = Field(min_length=1, max_length=MAX_LAYERS)  # in the order of the forward pass
    data_s: Seconds  # making the batch
    zero_s: Seconds  # clearing the gradients
    loss_s: Seconds  # the loss, and its part of the backward pass
    optimizer_s: Seconds
    # seconds of each recorded step divided by their median: how steady the processor was
    jitter: tuple[Annotated[float, Field(ge=0)], ...] = Field(default=(), max_length=MAX_STEPS, examples=[[1.0]])

    @model_validator(mode="after")
    def _check_shapes(self) -> Profile:
        """Raise ValueError if shapes and sizes differ in bytes: emulation uses the shapes, predictions the sizes."""
        item = int(re.sub(r"\D", "", self.dtype)) / 8
        for layer in self.layers:
            for size, shape in zip(layer.sizes, layer.shapes, strict=False):  # or no shapes
                if math.prod(shape) * item != size:
                    rule = f"a tensor with shape {list(shape)} has {math.prod(shape) * item:.0f} bytes, not {size}"
                    raise ValueError(f"layer {layer.name!r}: in {self.dtype} {rule}")
        return self

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients: S in the formulas of docs and reports."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds of a whole step without synchronisation."""
        return self.data_s + self.zero_s + self.forward_s + self.loss_s + self.backward_s + self.optimizer_s

    def write(self, path: Path) -> None:
        write_whole(path, self.model_dump_json(by_alias=True, indent=1))

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile. Raises SpecError if it is missing or damaged, SchemaError if another version wrote it."""
        return cls.parse(read_bounded(path, MAX_PROFILE_BYTES), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> Profile:
        """Return the profile in the content of a file; messages show its path as `where`. Raises like `read`."""
        way_out = "Write it with `testbed profile`."
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{where}: not JSON ({one_line(str(error))}). {way_out}") from None
        if not isinstance(values, dict) or "layers" not in values:
            raise SpecError(f"{where}: holds no profile. {way_out}")
        if values.get("schema") != PROFILE_SCHEMA:
            rule = f"schema {one_line(str(values.get('schema')))}, this testbed reads profiles of {PROFILE_SCHEMA}"
            raise SchemaError(f"{where}: {rule}. {way_out}")
        return cls.load(values, where)
