"""Argument lists of tc, docker, setpriv and ssh are those of arguments.txt, so that a diff shows each change."""

from __future__ import annotations

from pathlib import Path

from tests.support.arguments import hosts, network

RECORDED = Path(__file__).with_name("arguments.txt")


def test_argument_lists_are_those_that_were_recorded() -> None:
    assert [*network(), *hosts()] == RECORDED.read_text().splitlines(), "see tests/support/arguments.py"
