"""Congestion controls of the kernel: existing ones are accepted, others are refused with the list."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from testbed.net import congestion
from testbed.net.congestion import check_congestion_control, congestion_controls
from testbed.spec.errors import Unavailable
from testbed.spec.words import Place, reading


@pytest.mark.parametrize("place", [Place.COMMAND_LINE, Place.COMPOSE])
def test_a_congestion_control_that_does_not_exist_is_refused_with_those_that_do(place: Place) -> None:
    known = ", ".join(congestion_controls())
    name = {Place.COMMAND_LINE: "--set node.congestion", Place.COMPOSE: "CONGESTION"}[place]
    with reading(place), pytest.raises(Unavailable) as refusal:
        check_congestion_control("foo")
    rule = "this kernel has no such TCP congestion control"
    assert str(refusal.value) == f"{name}='foo': {rule}. Use one of {known}."


def test_those_that_exist_are_accepted() -> None:
    assert "reno" in congestion_controls()  # part of every kernel
    for name in [None, *congestion.LOADED.read_text().split()]:
        check_congestion_control(name)


def test_a_module_that_is_not_loaded_counts_as_existing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / platform.release()
    folder.mkdir()
    lines = ["kernel/net/ipv4/tcp_fooish.ko.xz:", "kernel/net/ipv4/tcp_diag.ko: kernel/net/ipv4/inet_diag.ko"]
    (folder / "modules.dep").write_text("\n".join(lines))
    monkeypatch.setattr(congestion, "MODULES", tmp_path)
    check_congestion_control("fooish")
    assert "diag" not in congestion_controls()


def test_nothing_is_refused_where_the_kernel_has_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "LOADED", tmp_path / "none")
    check_congestion_control("foo")
