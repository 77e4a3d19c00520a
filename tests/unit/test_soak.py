"""A sample of the malicious input, and the soak itself: it resumes, and reports every missed limit."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.results.faults import FaultHistory
from testbed.results.folder import RunFolder
from testbed.spec.errors import Interrupted
from testbed.spec.experiment import Experiment
from testbed.spec.fault import FAULT_KINDS
from tests.soak import faults, hostile, outcomes, runs, sequences
from tests.soak.__main__ import PARTS
from tests.soak.hostile import SCRIPT, TERMINAL_CODES
from tests.soak.outcomes import Outcomes, Promise
from tests.support.provenance import DIRTY, ROOT
from tests.support.synthetic import make_run


@pytest.mark.parametrize(("name", "case"), [pytest.param(n, c, id=n) for n, c in hostile.hostile(48)])
def test_malicious_input_is_refused_with_a_sentence_or_works(name: str, case: object) -> None:
    outcome = case()  # type: ignore[operator]
    assert outcome["ok"], outcome


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "tests" / "soak").glob("*.py")))
def test_every_module_can_be_imported(module: str) -> None:
    """`make test` runs only a sample of the soak, so a name that has moved is found here."""
    importlib.import_module(f"tests.soak.{module}")


PROMISE = Promise("all", cases=2, least={"named": 1}, most={"most_seconds": 1.5})


def test_a_soak_resumes_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc")
    done: list[str] = []

    def case(name: str, ok: bool) -> object:
        return lambda: done.append(name) or {"ok": ok, "seconds": 2.0}

    first = Outcomes("part", PROMISE, tmp_path)
    first.run([("a", case("a", True))])  # type: ignore[list-item]
    again = Outcomes("part", PROMISE, tmp_path)
    again.run([("a", case("a", True)), ("b", case("b", False))])  # type: ignore[list-item]
    assert done == ["a", "b"]
    assert again.counts() == {"ok": 1, "of": 2, "median_seconds": 2.0, "most_seconds": 2.0, "minutes": 0.0}
    assert again.close() is False
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "another")
    assert Outcomes("part", PROMISE, tmp_path).cases == {}


def test_outcomes_of_uncommitted_changes_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc" + DIRTY)
    Outcomes("part", PROMISE, tmp_path).run([("a", lambda: {"ok": True})])
    assert Outcomes("part", PROMISE, tmp_path).cases == {}


def test_a_case_that_raises_is_a_stored_miss_and_the_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc")

    def hangs() -> dict[str, Any]:
        raise runs.CommandHangs("it did not end in 300 s")

    Outcomes("part", PROMISE, tmp_path).run([("seed 7", hangs), ("seed 8", lambda: {"ok": True})])
    stored = Outcomes("part", PROMISE, tmp_path).cases
    assert [outcome["ok"] for outcome in stored.values()] == [False, True]
    assert "it did not end in 300 s" in stored["seed 7"]["raised"]
    assert "MISS seed 7: " in capsys.readouterr().out

    def interrupted() -> dict[str, Any]:
        raise Interrupted("stopped by SIGTERM")

    with pytest.raises(Interrupted):
        Outcomes("part", PROMISE, tmp_path).run([("seed 9", interrupted)])


def test_a_command_that_hangs_is_killed_with_all_of_its_processes(tmp_path: Path) -> None:
    """Also one with a session of its own, as ranks have. It ignores SIGTERM, and starts another when one ends."""
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True)\n"
        "while True: subprocess.Popen(['sleep', sys.argv[1]], start_new_session=True).wait()"
    )
    seconds = f"{1000 + os.getpid()}.5"  # no other process has this argument
    argv = [sys.executable, "-c", code, seconds]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process, pytest.raises(runs.CommandHangs, match=r"did not end in 2 s .* It printed: begun"):
        runs.output_of(process, 2.0)
    assert process.returncode == -signal.SIGKILL
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            assert seconds.encode() not in path.read_bytes().split(b"\0")


def test_without_an_engine_the_container_cases_are_missed_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/missing.sock")
    _, _, promise = PARTS["containers"]
    soak = Outcomes("containers", promise, tmp_path)
    soak.run(faults.containers())
    assert soak.close() is False
    assert soak.counts()["ok"] == 0
    assert "no Docker engine answers" in capsys.readouterr().out
    assert Outcomes("containers", promise, tmp_path).cases == {}


def test_a_soak_killed_during_a_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc")
    first = Outcomes("part", PROMISE, tmp_path)
    first.run([("a", lambda: {"ok": True})])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        first.run([("b", lambda: {"ok": True})])
    assert list(Outcomes("part", PROMISE, tmp_path).cases) == ["a"]


def test_every_missed_limit_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcomes, "code_commit", lambda *_: "abc")
    soak = Outcomes("part", PROMISE, tmp_path)
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


def test_a_part_has_as_many_cases_as_it_promises() -> None:
    """A count that is absent misses its limit."""
    for part, (module, function, promise) in PARTS.items():
        cases = dict(getattr(importlib.import_module(f"tests.soak.{module}"), function)())
        assert len(cases) == promise.cases, part
    assert Promise("", 0, least={"named": 1}).missed({"of": 0, "ok": 0, "minutes": 0}) != []
    assert Promise("", 0, most={"left": 0}).missed({"of": 0, "ok": 0, "minutes": 0}) != []


# --- cases that look well and are not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda: print("fine\n\tso far"), None),
        (lambda: print(f"left out: {TERMINAL_CODES}"), r"printed ['\x07', '\x1b']"),
        (lambda: Path("report.html").write_text(f"<h1>{SCRIPT}</script></h1>"), "report.html"),
        (lambda: Path("plot.svg").write_text(f"<svg>{SCRIPT}</script></svg>"), "plot.svg"),
    ],
    ids=["harmless", "printed", "page", "drawing"],
)
def test_control_characters_and_live_scripts_in_the_output_are_a_miss(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], found: str | None
) -> None:
    monkeypatch.setitem(hostile.KINDS, "given", lambda folder, rng: use)
    outcome = hostile._try("given", 0)
    assert outcome["ok"] is (found is None) and outcome.get("loose") == ([found] if found else None)


def ended(resumed: int) -> SimpleNamespace:
    """What identical_case reads of a run that was killed after 30 steps and then finished."""
    methods: dict[str, Any] = {"event": lambda kind: {"step": 30}, "left": list, "final_hash": lambda: "abc"}
    methods |= {"started": lambda: True, "in_table": lambda: True, "resumed": lambda: resumed}
    return SimpleNamespace(code=0, status="ok", output="", **methods)


@pytest.mark.parametrize(("every", "resumed", "ok"), [(7, 28, True), (7, 0, False), (7, 21, False), (50, 0, True)])
def test_a_run_that_restarted_before_its_last_checkpoint_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, every: int, resumed: int, ok: bool
) -> None:
    monkeypatch.setattr(faults, "run_testbed", lambda *_, out: ended(resumed))
    outcome = faults.identical_case(["base"], ["--set", f"checkpoint={every}"], {})
    assert outcome["ok"] is ok and outcome["identical"] and outcome["resumed"] is (resumed > 0)


def test_the_step_of_a_resume_is_read_from_the_summary(tmp_path: Path) -> None:
    summary = make_run(tmp_path / "r")
    run = runs.Run(0, "", 0.0, 1, RunFolder(tmp_path / "r"), "ok", [], frozenset(), False)
    assert run.resumed() == 0
    noted = summary.model_copy(update={"notes": ["an attempt failed", "resumed after step 28: what went before"]})
    run.folder.summary.write_text(noted.model_dump_json(by_alias=True))
    assert run.resumed() == 28


def test_the_promise_counts_every_kill_point_after_a_checkpoint() -> None:
    points = [re.search(r"@step(\d+) checkpoint=(\d+)", name) for name, _ in faults.resume()]
    due = [faults.certain_checkpoint(int(point[2]), int(point[1])) > 0 for point in points if point]
    _, _, promise = PARTS["resume"]
    assert len(due) == promise.cases and promise.least["resumed"] == sum(due) > promise.cases / 2


# --- the checker of random sequences --------------------------------------------------------------------------------

KILLED = [
    ("injected", {"fault": "kill:rank1@step5", "rank": 1, "step": 5, "begun": 10.0}),
    ("ended", {"rank": 1, "code": -9, "at": 10.1}),
]
OTHERS = [("ended", {"rank": rank, "code": 6, "at": 10.4}) for rank in (0, 2, 3)]
AGAIN = [("again", {"at": 11.0}), *(("ended", {"rank": rank, "code": 0, "at": 20.0}) for rank in range(4))]


def attempts(*events: tuple[str, dict[str, Any]]) -> list[sequences.Attempt]:
    return list(sequences._attempts(FaultHistory([{"event": name, **values} for name, values in events])))


def test_a_killed_rank_that_is_named_in_time_is_right() -> None:
    first, second = attempts(*KILLED, *OTHERS, *AGAIN)
    assert sequences._wrong_attempt(first, "rank 1 (node1) was killed by SIGKILL. See its log") == []
    assert sequences._wrong_attempt(second, None) == []


@pytest.mark.parametrize(
    ("events", "message", "wrong"),
    [
        ([*KILLED, *OTHERS], "rank 2 (node2) was killed", "rank 2 is named"),
        ([*KILLED, *OTHERS], "the disk is full", "no rank is named"),
        ([*KILLED, ("ended", {"rank": 0, "code": 6, "at": 25.0})], "rank 1 (node1) died", "it ended 15.0 s after"),
        ([KILLED[0], *AGAIN[1:]], None, "it survived kill:rank1@step5"),
        (
            [("injected", {"fault": "slow:rank1@step5+1s=0.5cpu", "rank": 1, "step": 5, "begun": 1.0}), *OTHERS],
            "rank 1 (node1) ",
            "rank 1 is",
        ),
        (
            [*KILLED[:1], ("injected", {"fault": "cut:rank2@step5", "rank": 2, "step": 5, "begun": 12.0}), *OTHERS],
            "rank 2 (node2) is silent",
            "rank 2 is named",
        ),
    ],
    ids=["another rank", "no rank", "late", "survived", "harmless fault", "the later fault"],
)
def test_the_checker_sees_what_is_wrong_with_an_attempt(
    events: list[tuple[str, dict[str, Any]]], message: str | None, wrong: str
) -> None:
    (line,) = sequences._wrong_attempt(attempts(*events)[0], message)
    assert line.startswith(wrong)


@pytest.mark.parametrize(
    ("fault", "step", "fatal"),
    [
        *((f"{kind}:rank1@step5", 5, True) for kind in (*sequences.AT_ONCE, *sequences.SILENT)),
        *((f"{kind}:rank1@step5", 95, False) for kind in ("exit", "oom", "disk-full", "pause", "cut")),
        ("kill:rank1@step5", 95, True),
        ("pause:rank1@step5+8s", 5, False),
        ("slow:rank1@step5+1s=0.5cpu", 5, False),
    ],
)
def test_a_fault_that_stops_its_rank_must_not_be_survived(fault: str, step: int, fatal: bool) -> None:
    """Near the end its rank may have done its last step before the controller sees that."""
    injected = ("injected", {"fault": fault, "rank": 1, "step": step, "begun": 10.0})
    (attempt,) = attempts(injected, *AGAIN[1:])
    assert sequences._wrong_attempt(attempt, None) == ([f"it survived {fault}"] if fatal else [])


def test_every_kind_of_fault_has_a_rule_in_the_soak_and_a_case_in_the_experiment() -> None:
    """Without a rule the soak would expect that every rank survives a new kind."""
    rules = sorted([*sequences.AT_ONCE, *sequences.SILENT, *sequences.SLOWING])
    assert rules == sorted(FAULT_KINDS), "Name the kind in AT_ONCE, SILENT or SLOWING of tests/soak/sequences.py"
    runs = Experiment.read(ROOT / "experiments" / "faults.toml").runs()
    assert {fault.kind for run in runs for fault in run.faults} == set(FAULT_KINDS), "Add it to experiments/faults.toml"


def test_a_sequence_can_be_repeated_by_its_seed() -> None:
    assert sequences.draw(7, "netns") == sequences.draw(7, "netns") != sequences.draw(8, "netns")
    drawn = [fault.kind for seed in range(200) for fault in sequences.draw(seed, "netns")[0]]
    assert set(drawn) == set(FAULT_KINDS) and 400 <= len(drawn) <= 1000
