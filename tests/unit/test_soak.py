"""A sample of the hostile files, and that a soak goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import book, hostile


@pytest.mark.parametrize(("name", "case"), [pytest.param(n, c, id=n) for n, c in hostile.hostile(48)])
def test_a_hostile_file_is_refused_with_a_sentence_or_run(name: str, case: object) -> None:
    outcome = case()  # type: ignore[operator]
    assert outcome["ok"], outcome


def test_a_soak_goes_on_where_it_stopped_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "code_commit", lambda: "abc")
    done: list[str] = []

    def case(name: str, ok: bool) -> object:
        return lambda: done.append(name) or {"ok": ok, "seconds": 2.0}

    first = book.Book("part", "all", tmp_path)
    first.run([("a", case("a", True))])  # type: ignore[list-item]
    again = book.Book("part", "all", tmp_path)
    again.run([("a", case("a", True)), ("b", case("b", False))])  # type: ignore[list-item]
    assert done == ["a", "b"]
    assert again.counts() == {"ok": 1, "of": 2, "median_seconds": 2.0, "most_seconds": 2.0}
    assert again.close() is False
    monkeypatch.setattr(book, "code_commit", lambda: "another")
    assert book.Book("part", "all", tmp_path).cases == {}
