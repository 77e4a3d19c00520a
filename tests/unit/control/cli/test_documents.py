"""With --json every command line prints one document, also if it fails or is refused."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed import __version__
from testbed.control.cli import documents, main
from testbed.results.folder import RunFolder
from testbed.spec.errors import TestbedError
from testbed.spec.run import SCHEMA
from tests.support.fake_substrate import BAD, GOOD, FakeRuns, fails_with, succeeds
from tests.support.synthetic import make_run

RUN = ["run", "--on", "fake", "--data", "synthetic", "--nodes", "2", "--rate", "200mbit", "--steps", "4", "--json"]
SWEEP = 'title = "x"\n[base]\ndata = { name = "synthetic" }\nnodes = 2\nsteps = 4\n[axes]\nmode = ["ring", "tree"]\n'


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_RUNS", raising=False)
    documents.reset()
    fake = FakeRuns()
    fake.receipts = itertools.repeat(GOOD)
    return fake


def invoke(fake: FakeRuns, *argv: str) -> Any:
    return CliRunner().invoke(main.app, list(argv), obj={"fake": fake.type})


def document(result: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints, or `call` for the error that the command raises."""
    if isinstance(result.exception, TestbedError):
        documents.print_failure(result.exception)
    found: dict[str, Any] = json.loads(result.stdout + capsys.readouterr().out)
    return found


REFUSALS = {
    "a mode": (["run", "--mode", "rong", "--json"], "mode 'rong'"),
    "an option": (["run", "--rates", "1mbit", "--json"], "--rates"),
    "a file": (["sweep", "missing.toml", "--json"], "missing.toml"),
    "a folder": (["trace", "nowhere", "--json"], "nowhere"),
}


@pytest.mark.parametrize(("argv", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_is_a_document_with_the_sentence_of_stderr(argv: list[str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed.control", *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 2
    assert words in found["reason"] and found["reason"] in done.stderr
    assert (found["status"], found["folder"], found["runs"]) == ("refused", None, [])


def test_without_json_a_refusal_prints_nothing_on_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed.control", "run", "--mode", "rong"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "" and done.returncode == 2


def test_a_run_ends_with_the_command_for_its_page(fake: FakeRuns, tmp_path: Path) -> None:
    done = invoke(fake, *RUN[:-1], "--out", "runs/my run")
    assert done.stdout.endswith("all files are in runs/my run\nits page: testbed report 'runs/my run'\n")


def test_a_failed_run_is_a_document_with_its_folder_and_its_summary(
    fake: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.play = fails_with(1, "it broke")
    found = document(invoke(fake, *RUN, "--out", "r"), capsys)
    assert (found["status"], found["exit_code"], found["folder"]) == ("failed", 3, "r")
    assert "it broke" in found["reason"] and found["runs"][0]["reason"] == found["reason"]


def test_an_invalid_run_is_a_document_with_its_reason(fake: FakeRuns, capsys: pytest.CaptureFixture[str]) -> None:
    fake.receipts = itertools.repeat(BAD)
    found = document(invoke(fake, *RUN, "--out", "r"), capsys)
    assert (found["status"], found["exit_code"], found["folder"]) == ("invalid", 5, "r")
    assert found["reason"] == found["runs"][0]["reason"] != ""


def test_a_run_that_is_ok_has_the_same_keys(fake: FakeRuns) -> None:
    found = json.loads(invoke(fake, *RUN, "--out", "r").stdout)
    assert {key: found[key] for key in ("status", "reason", "exit_code", "folder")} == {
        "status": "ok",
        "reason": "",
        "exit_code": 0,
        "folder": "r",
    }


def test_a_sweep_with_a_failed_run_prints_one_document_with_all_runs(
    fake: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_in_tree(folder: RunFolder, rank: int) -> int | None:
        broken = folder.read_spec().mode.algorithm == "tree"
        return fails_with(1, "it broke")(folder, rank) if broken else succeeds(folder, rank)

    fake.play = fails_in_tree
    (tmp_path / "x.toml").write_text(SWEEP)
    result = invoke(fake, "sweep", "x.toml", "--on", "fake", "--json")
    assert isinstance(result.exception, TestbedError)
    found = document(result, capsys)
    assert (found["status"], found["exit_code"]) == ("failed", 3) and "it broke" in found["reason"]
    assert [run["status"] for run in found["runs"]] == ["ok", "failed"]


def test_version_and_trace_have_a_document(tmp_path: Path) -> None:
    version = json.loads(CliRunner().invoke(main.app, ["version", "--json"]).stdout)
    assert version == {"version": __version__, "schema": SCHEMA}
    make_run(tmp_path / "r")
    trace = json.loads(CliRunner().invoke(main.app, ["trace", str(tmp_path / "r"), "--json"]).stdout)
    events = json.loads(Path(trace["trace"]).read_text())["traceEvents"]
    assert trace["spans"] == sum(event["ph"] == "X" for event in events) > 0


def test_a_number_that_json_cannot_write_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    documents.reset()
    documents.print_document({"loss": float("nan"), "times": [1.0, float("inf")], "path": Path("r")})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail) == {"loss": None, "times": [1.0, None], "path": "r"}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Call `testbed version --json`, which raises this exception instead."""

    def call(raised: BaseException) -> int:
        def fail(*_: object, **__: object) -> None:
            raise raised

        monkeypatch.setattr(main, "print_document", fail)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            return main.call("testbed", ["version", "--json"])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return call


def test_an_unexpected_exception_is_a_document_and_keeps_its_traceback(
    call: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError):
        call(KeyError("lost"))
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["exit_code"], found["runs"]) == ("failed", 1, [])
    assert found["reason"] == "unexpected error: KeyError: 'lost'"


def test_an_end_with_a_text_is_a_failure_with_that_text(
    call: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Python does the same: sys.exit("text") prints it and exits with 1."""
    assert call(SystemExit("it cannot go on")) == 1
    printed = capsys.readouterr()
    assert printed.err == "it cannot go on\n" and json.loads(printed.out)["reason"] == "it cannot go on"


def test_an_end_without_a_code_is_a_success(call: Callable[[BaseException], int]) -> None:
    assert call(SystemExit()) == 0
