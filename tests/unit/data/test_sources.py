"""Archives are not trusted: no path of theirs is used, no size of theirs believed."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest

from testbed.data import fetch


def test_links_and_foreign_paths_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "evil.tgz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("package/a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("../../escaped"))
    with pytest.raises(ValueError, match="no package/a"):
        fetch._members(path, ["package/a"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["evil.tgz"]


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MEMBER_LIMIT", 10)
    path = tmp_path / "bomb.tgz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("a")
        member.size = 11
        tar.addfile(member, io.BytesIO(bytes(11)))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        fetch._members(path, ["a"])


@pytest.mark.parametrize("data", [b"", b"\0\0\x0d\x01\0\0\0\0", b"\0\0\x08\x01\0\0\0\x05abc"])
def test_no_idx_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        fetch._idx(data)


def test_only_the_official_servers_are_named() -> None:
    text = Path(fetch.__file__).read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"www.cs.toronto.edu", "ossci-datasets.s3.amazonaws.com"}
