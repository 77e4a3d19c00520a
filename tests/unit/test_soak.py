"""A sample of the hostile files, and that a soak goes on where it stopped and tells what it missed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.soak import book, faults, hostile, runs
from tests.soak.__main__ import PARTS
from tests.soak.nasty import LIVE, OBEYED
from tests.support.provenance import DIRTY
from tests.support.synthetic import make_run


@pytest.mark.parametrize(("name", "case"), [pytest.param(n, c, id=n) for n, c in hostile.hostile(48)])
def test_a_hostile_file_is_refused_with_a_sentence_or_run(name: str, case: object) -> None:
    outcome = case()  # type: ignore[operator]
    assert outcome["ok"], outcome


PROMISE = book.Promise("all", cases=2, least={"named": 1}, most={"most_seconds": 1.5})


def test_a_soak_goes_on_where_it_stopped_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "code_commit", lambda *_: "abc")
    done: list[str] = []

    def case(name: str, ok: bool) -> object:
        return lambda: done.append(name) or {"ok": ok, "seconds": 2.0}

    first = book.Book("part", PROMISE, tmp_path)
    first.run([("a", case("a", True))])  # type: ignore[list-item]
    again = book.Book("part", PROMISE, tmp_path)
    again.run([("a", case("a", True)), ("b", case("b", False))])  # type: ignore[list-item]
    assert done == ["a", "b"]
    assert again.counts() == {"ok": 1, "of": 2, "median_seconds": 2.0, "most_seconds": 2.0, "minutes": 0.0}
    assert again.close() is False
    monkeypatch.setattr(book, "code_commit", lambda *_: "another")
    assert book.Book("part", PROMISE, tmp_path).cases == {}


def test_cases_of_a_tree_with_changes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "code_commit", lambda *_: "abc" + DIRTY)
    book.Book("part", PROMISE, tmp_path).run([("a", lambda: {"ok": True})])
    assert book.Book("part", PROMISE, tmp_path).cases == {}


def test_without_an_engine_containers_are_a_miss_that_is_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(book, "code_commit", lambda *_: "abc")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    _, _, promise = PARTS["containers"]
    soak = book.Book("containers", promise, tmp_path)
    soak.run(faults.containers())
    assert soak.close() is False
    assert soak.counts()["ok"] == 0
    assert "no Docker engine answers" in capsys.readouterr().out
    assert book.Book("containers", promise, tmp_path).cases == {}


def test_a_soak_killed_while_it_writes_leaves_the_book_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "code_commit", lambda *_: "abc")
    first = book.Book("part", PROMISE, tmp_path)
    first.run([("a", lambda: {"ok": True})])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        first.run([("b", lambda: {"ok": True})])
    assert list(book.Book("part", PROMISE, tmp_path).cases) == ["a"]


def test_every_limit_that_is_missed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(book, "code_commit", lambda *_: "abc")
    soak = book.Book("part", PROMISE, tmp_path)
    soak.run([("a", lambda: {"ok": True, "seconds": 1.0, "named": False})])
    assert soak.close() is False
    assert "MISSED: of 1, promised at least 2" in capsys.readouterr().out
    soak.run([("b", lambda: {"ok": True, "seconds": 1.6, "named": True})])
    assert soak.close() is False
    assert "MISSED: most_seconds 1.6, promised at most 1.5" in capsys.readouterr().out
    soak.cases["b"] |= {"seconds": 1.5, "took": 26 * 60}
    assert soak.promise.missed(soak.counts()) == ["minutes 26.0, promised at most 25"]
    soak.cases["b"]["took"] = 1.0
    assert soak.close() is True
    assert "all: kept" in capsys.readouterr().out


def test_a_part_promises_what_its_cases_can_keep() -> None:
    """Complete means as many as are promised, and what was never counted is no limit that holds."""
    for part, (module, function, promise) in PARTS.items():
        cases = dict(getattr(importlib.import_module(f"tests.soak.{module}"), function)())
        assert len(cases) == promise.cases, part
    assert book.Promise("", 0, least={"named": 1}).missed({"of": 0, "ok": 0, "minutes": 0}) != []
    assert book.Promise("", 0, most={"left": 0}).missed({"of": 0, "ok": 0, "minutes": 0}) != []


# --- a case that looks well and is not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda: print("fine\n\tso far"), None),
        (lambda: print(f"left out: {OBEYED}"), r"printed ['\x07', '\x1b']"),
        (lambda: Path("report.html").write_text(f"<h1>{LIVE}</script></h1>"), "report.html"),
        (lambda: Path("plot.svg").write_text(f"<svg>{LIVE}</script></svg>"), "plot.svg"),
    ],
    ids=["harmless", "printed", "page", "drawing"],
)
def test_words_that_a_terminal_or_a_browser_obeys_are_a_miss(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], found: str | None
) -> None:
    monkeypatch.setitem(hostile.KINDS, "given", lambda folder, rng: use)
    outcome = hostile._try("given", 0)
    assert outcome["ok"] is (found is None) and outcome.get("loose") == ([found] if found else None)


def ended(resumed: int) -> SimpleNamespace:
    """What `_same` asks of a run that was killed when 30 steps were done, and finished."""
    told: dict[str, Any] = {"event": lambda kind: {"step": 30}, "left": list, "final_hash": lambda: "abc"}
    told |= {"started": lambda: True, "tabled": lambda: True, "resumed": lambda: resumed}
    return SimpleNamespace(code=0, status="ok", said="", **told)


@pytest.mark.parametrize(("every", "resumed", "ok"), [(7, 28, True), (7, 0, False), (7, 21, False), (50, 0, True)])
def test_a_run_that_began_anew_past_a_checkpoint_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, every: int, resumed: int, ok: bool
) -> None:
    monkeypatch.setattr(faults, "testbed", lambda *_, out: ended(resumed))
    outcome = faults._same(["base"], ["--set", f"checkpoint={every}"], {})
    assert outcome["ok"] is ok and outcome["identical"] and outcome["resumed"] is (resumed > 0)


def test_where_a_run_went_on_is_read_from_its_summary(tmp_path: Path) -> None:
    summary = make_run(tmp_path / "r")
    run = runs.Run(0, "", 0.0, 1, runs.RunFolder(tmp_path / "r"), "ok", [], frozenset(), False)
    assert run.resumed() == 0
    noted = summary.model_copy(update={"notes": ["an attempt failed", "resumed after step 28: what went before"]})
    run.folder.summary.write_text(noted.model_dump_json(by_alias=True))
    assert run.resumed() == 28


def test_every_kill_point_past_a_checkpoint_is_promised_to_resume() -> None:
    points = [re.search(r"@step(\d+) checkpoint=(\d+)", name) for name, _ in faults.resume()]
    due = [faults.kept(int(point[2]), int(point[1])) > 0 for point in points if point]
    _, _, promise = PARTS["resume"]
    assert len(due) == promise.cases and promise.least["resumed"] == sum(due) > promise.cases / 2
