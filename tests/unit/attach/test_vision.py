"""torchvision's data sets without the internet: links instead of downloads. Its real classes: test_data_gloo.py."""

from __future__ import annotations

from pathlib import Path

from testbed.attach.vision import Vision, link


def test_a_link_is_made_where_the_script_looks(tmp_path: Path) -> None:
    (tmp_path / "ours/MNIST/raw").mkdir(parents=True)
    root = str(tmp_path / "new/data")
    assert link(root, "MNIST/raw", str(tmp_path / "ours")) == root
    assert (tmp_path / "new/data/MNIST/raw").resolve() == tmp_path / "ours/MNIST/raw"
    assert link(root, "MNIST/raw", str(tmp_path / "ours")) == str(tmp_path / "ours"), "an empty folder is no data set"
    (tmp_path / "ours/MNIST/raw/images").touch()
    assert link(root, "MNIST/raw", str(tmp_path / "ours")) == root


def test_where_no_link_can_be_made_the_data_is_read_from_our_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert link(str(tmp_path / "file"), "MNIST/raw", "/ours") == "/ours"


def test_a_change_is_noted_once() -> None:
    changed: list[str] = []
    vision = Vision({}, changed, lambda seam, error: None)
    vision.note("a")
    vision.note("a")
    assert changed == ["a"]
