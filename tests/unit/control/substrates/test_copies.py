"""Copies of a single node's job. tests/net/test_rootless.py runs them."""

from __future__ import annotations

from pathlib import Path

from testbed.control.substrates.copies import Copies, WithCopies
from testbed.control.substrates.fake import FakeProcess


def test_a_copy_has_a_folder_and_an_address_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    argv = ["python", "-m", "testbed.rank", "--folder", str(tmp_path)]
    copies = Copies(1, 2)
    copies.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy1", "copy2"]
    node, words, env, log = copies.job(2, "10.77.0.12", argv, {"MASTER_ADDR": "10.77.0.10"})
    assert (node, words[-1], env["MASTER_ADDR"]) == (2, str(tmp_path / "copy2"), "10.77.0.12")
    assert (tmp_path / "copy2" / "spec.json").read_text() == "{}" and log == tmp_path / "copy2" / "rank0.log"


def test_a_job_with_copies_has_ended_when_all_have_ended() -> None:
    first, copy = FakeProcess(pid=1), FakeProcess(pid=2)
    whole = WithCopies(first, [copy])
    assert whole.poll() is None
    first.code = 0
    assert whole.poll() is None
    copy.code = 0
    assert whole.poll() == 0
    first.code = copy.code = None
    first.code = 3  # a failure is reported at once
    assert whole.poll() == 3
