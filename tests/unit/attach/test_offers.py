"""What the launcher links into a script's working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.attach import offers
from testbed.attach.offers import offer


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "own" / "torchvision"
    (root / "MNIST" / "raw").mkdir(parents=True)
    (root / "MNIST" / "raw" / "images").write_text("ours")
    monkeypatch.setattr(offers, "layouts", lambda data, scratch: {"mnist": root})
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def linked(work: Path, *places: str) -> dict[str, object]:
    return offer(work.parent / "own", work, places, work.parent)


def test_data_is_linked_at_every_place_and_the_folders_above_belong_to_the_script(work: Path) -> None:
    found = linked(work, "data", "some/where")
    assert (work / "data/MNIST/raw/images").read_text() == (work / "some/where/MNIST/raw/images").read_text() == "ours"
    assert (work / "data/MNIST/raw").is_symlink() and not (work / "data/MNIST").is_symlink()
    assert set(found) == {"mnist"} and set(found["mnist"]["digests"]) >= {"train_images"}  # type: ignore[index]


def test_what_the_script_brings_stays(work: Path) -> None:
    (work / "data/MNIST/raw").mkdir(parents=True)
    (work / "data/MNIST/raw/images").write_text("theirs")
    linked(work, "data")
    assert (work / "data/MNIST/raw/images").read_text() == "theirs"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_written_through_a_link_or_over_a_file(work: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if kind == "link":
        (work / "data").symlink_to(outside)
    else:
        (work / "data").write_text("a file")
    linked(work, "data")
    assert list(outside.iterdir()) == [] and (kind == "link" or (work / "data").read_text() == "a file")
