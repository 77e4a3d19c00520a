"""Limits of time and disk for a script that is not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.control.runs import allowance
from testbed.control.runs.allowance import Allowance, size_of
from testbed.control.runs.supervisor import RankState, Tail
from testbed.control.substrates.fake import FakeProcess
from testbed.spec.errors import RankFailed
from testbed.spec.script import Limits


class Counting:
    polls = 0

    def poll(self, ranks: Sequence[RankState]) -> None:
        self.polls += 1


def rank(folder: Path, code: int | None = None) -> RankState:
    state = RankState(FakeProcess(1), Tail(folder / "rank0.jsonl"))
    state.code = code
    return state


def test_a_script_that_runs_too_long_is_ended(tmp_path: Path) -> None:
    watch = Allowance(Limits(seconds=1e-9), tmp_path, Counting())
    with pytest.raises(RankFailed, match="ran longer than 1e-09 s, which is its limit"):
        watch.poll([rank(tmp_path)])
    watch.poll([rank(tmp_path, code=0)])  # it has ended


def test_a_run_folder_that_grows_too_large_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "SIZE_EVERY_S", -1.0)
    inner = Counting()
    watch = Allowance(Limits(disk=1 << 20), tmp_path, inner)
    watch.poll([rank(tmp_path)])
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(RankFailed, match="larger than 1 MiB, which is its limit"):
        watch.poll([rank(tmp_path)])
    assert inner.polls == 2


def test_a_script_without_limits_runs_on(tmp_path: Path) -> None:
    inner = Counting()
    Allowance(None, tmp_path, inner).poll([rank(tmp_path)])
    assert inner.polls == 1


def test_a_link_counts_as_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/kcore")
    assert size_of(tmp_path) < 1000
