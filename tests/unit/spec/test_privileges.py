"""Whether uid 0 is root, or an ordinary user in a user namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.spec.privileges import alone_as


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("         0       1000          1\n", 1000),  # unshare --map-root-user
        ("         0          0 4294967295\n", None),  # no user namespace
        ("         0       1000          1\n         1     100000      65536\n", None),  # a rootless container
        ("      1000          0          1\n", None),
        ("", None),
    ],
)
def test_uid_0_is_a_user_if_the_namespace_has_no_other(tmp_path: Path, content: str, found: int | None) -> None:
    (tmp_path / "uid_map").write_text(content)
    assert alone_as(tmp_path / "uid_map") == found
    assert alone_as(tmp_path / "missing") is None
