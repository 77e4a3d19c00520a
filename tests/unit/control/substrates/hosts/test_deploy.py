"""Archives that are sent to hosts. tests/hosts sends them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from testbed.control.substrates.hosts import deploy
from testbed.control.substrates.hosts.deploy import BLOCK_BYTES, compress, pack_data, pack_image
from testbed.spec.errors import TestbedError


def test_compressed_blocks_are_one_gzip_file() -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 100)
    out = io.BytesIO()
    compress(io.BytesIO(data), out)
    assert gzip.decompress(out.getvalue()) == data and len(out.getvalue()) < len(data) / 10


def test_a_data_set_that_cannot_be_read_leaves_no_incomplete_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / "a.npy").write_bytes(b"x" * 100)
    with pytest.raises(TestbedError, match=r"mnist: cannot be packed .*b\.npy.*testbed data verify mnist"):
        pack_data("mnist", {"a.npy": "1", "b.npy": "2"})
    assert list((tmp_path / "cache").rglob("*.gz")) == []


def test_images_of_one_content_and_two_names_are_two_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host looks for the name that is in the archive."""
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(deploy.engine, "inspect_image", lambda: {"Size": 1})
    for image in ("testbed:latest", "testbed:mine"):
        monkeypatch.setenv("IMAGE", image)
        assert gzip.decompress(pack_image().path.read_bytes()) == f"save {image}\n".encode()
