"""profile.json: what is written is read again; other versions and damaged files are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.results.profile import Profile, ProfiledLayer
from testbed.spec.errors import SchemaError, SpecError

TWO_LAYERS = Profile(
    model="two",
    batch_per_rank=8,
    layers=(
        ProfiledLayer(name="0", sizes=(4000, 40), forward_s=0.01, backward_s=0.03),
        ProfiledLayer(name="1", forward_s=0.002, backward_s=0.001),
    ),
    data_s=0.001,
    zero_s=0.0005,
    loss_s=0.0015,
    optimizer_s=0.004,
    jitter=(0.99, 1.0, 1.02),
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    TWO_LAYERS.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == TWO_LAYERS
    assert json.loads((tmp_path / "profile.json").read_text())["schema"] == 1


def test_the_times_of_a_step_add_up() -> None:
    assert TWO_LAYERS.gradient_bytes == 4040
    assert TWO_LAYERS.step_s == pytest.approx(0.001 + 0.0005 + 0.012 + 0.0015 + 0.031 + 0.004)


def test_a_profile_of_another_schema_is_refused() -> None:
    written = TWO_LAYERS.model_dump(mode="json", by_alias=True) | {"schema": 2}
    with pytest.raises(SchemaError, match=r"p\.json: schema 2, this testbed reads profiles of 1\. Write it"):
        Profile.parse(json.dumps(written).encode(), "p.json")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", r"p\.json: not JSON"),
        (b"[1]", r"p\.json: holds no profile\. Write it with `testbed profile`"),
        (b'{"schema": 1}', r"p\.json: holds no profile"),
        (b'{"schema": 1, "layers": []}', r"p\.json: .*model: is missing"),
    ],
)
def test_what_is_no_profile_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Profile.parse(content, "p.json")


def test_a_negative_time_is_refused() -> None:
    written = TWO_LAYERS.model_dump(mode="json", by_alias=True) | {"data_s": -1.0}
    with pytest.raises(SpecError, match="data_s"):
        Profile.parse(json.dumps(written).encode(), "p.json")


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ([[10, 100], [10]], ""),
        ([[10, 100]], "2 sizes and 1 shapes"),
        ([[10, 10], [10]], r"layer '0': in float32 a tensor with shape \[10, 10\] has 400 bytes, not 4000"),
        ([[-10, -100], [10]], "shapes"),
    ],
)
def test_shapes_must_have_the_bytes_of_their_sizes(shapes: list[list[int]], sentence: str) -> None:
    written = TWO_LAYERS.model_dump(mode="json", by_alias=True)
    written["layers"][0]["shapes"] = shapes
    content = json.dumps(written).encode()
    if not sentence:
        assert Profile.parse(content, "p.json").layers[0].shapes == ((10, 100), (10,))
        return
    with pytest.raises(SpecError, match=sentence):
        Profile.parse(content, "p.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")
