"""`testbed compare`: its exit code and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.control.cli.main import app
from testbed.report.compare import compare
from testbed.spec.errors import UsageError
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def results(folder: Path, compute: float, noise: float = 0.01, seed: int = 1) -> Path:
    for mode in ("ring", "ddp"):
        make_run(folder / mode, Conditions(compute=compute, noise=noise, seed=seed), mode=mode, **LINK)
    return folder


def test_equal_results_are_the_same(tmp_path: Path) -> None:
    found = compare(results(tmp_path / "a", 4.0), results(tmp_path / "b", 4.0, seed=2), 0.05)
    assert [change.verdict for change in found.changes] == ["same", "same"] or not found.worse


@pytest.mark.parametrize(("factor", "code"), [(1.3, 1), (1.0, 0), (0.7, 0)])
def test_the_exit_code_is_1_when_b_is_worse_than_the_threshold(tmp_path: Path, factor: float, code: int) -> None:
    a, b = results(tmp_path / "a", 4.0), results(tmp_path / "b", 4.0 * factor)
    done = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert done.exit_code == code, done.output
    assert ("worse: ring" in done.output) == bool(code)


def test_a_generous_threshold_lets_it_pass(tmp_path: Path) -> None:
    a, b = results(tmp_path / "a", 4.0), results(tmp_path / "b", 5.0)
    assert CliRunner().invoke(app, ["compare", str(a), str(b), "--threshold", "0.5"]).exit_code == 0


def test_a_difference_smaller_than_the_noise_does_not_count(tmp_path: Path) -> None:
    a, b = results(tmp_path / "a", 4.0, noise=0.9), results(tmp_path / "b", 4.2, noise=0.9, seed=9)
    assert compare(a, b, 0.0).worse == []


def test_two_single_runs_are_compared_with_their_differences(tmp_path: Path) -> None:
    results(tmp_path, 4.0)
    found = compare(tmp_path / "ring", tmp_path / "ddp", 0.05)
    assert found.differences == ["mode: ring -> ddp"] and found.changes[0].verdict == "faster"


def test_a_cell_is_compared_on_the_same_substrate_if_there_are_several(tmp_path: Path) -> None:
    for side, netns in (("a", 4.0), ("b", 6.0)):
        make_run(tmp_path / side / "ddp", Conditions(compute=2.0, substrate="compose"), mode="ddp", **LINK)
        make_run(
            tmp_path / side / "ddp@netns", Conditions(compute=netns, substrate="netns"), mode="ddp", name="ddp", **LINK
        )
    verdicts = {change.name: change.worse for change in compare(tmp_path / "a", tmp_path / "b", 0.05).changes}
    assert verdicts == {"ddp on compose": False, "ddp on netns": True}


def test_a_run_on_a_substrate_that_only_a_has_is_lost(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "ddp", Conditions(substrate="compose"), mode="ddp", **LINK)
    for side in ("a", "b"):
        make_run(tmp_path / side / "ddp@netns", Conditions(substrate="netns"), mode="ddp", name="ddp", **LINK)
    found = compare(tmp_path / "a", tmp_path / "b", 0.05)
    assert [change.name for change in found.changes] == ["ddp on netns"] and found.lost == ["ddp on compose: not there"]


def test_a_change_of_substrate_is_printed(tmp_path: Path) -> None:
    for side, substrate in (("a", "compose"), ("b", "netns")):
        for mode in ("ring", "ddp"):
            make_run(tmp_path / side / mode, Conditions(substrate=substrate), mode=mode, **LINK)
    assert compare(tmp_path / "a", tmp_path / "b", 0.05).differences == ["on: compose -> netns"]
    assert "differs: on: compose -> netns" in CliRunner().invoke(app, ["compare", *sides(tmp_path)]).output
    assert compare(tmp_path / "a", tmp_path / "a", 0.05).differences == []


def test_a_change_of_machine_is_printed_and_two_machines_are_kept_apart(tmp_path: Path) -> None:
    for side, cpus in (("a", ("Xeon",)), ("b", ("Epyc",)), ("c", ("Xeon", "Epyc"))):
        for cpu in cpus:
            for mode in ("ring", "ddp"):
                make_run(tmp_path / side / f"{mode}-{cpu}", Conditions(cpu_model=cpu), mode=mode, **LINK)
    assert compare(tmp_path / "a", tmp_path / "b", 0.05).differences == ["machine: Xeon (2 cores) -> Epyc (2 cores)"]
    assert len(compare(tmp_path / "c", tmp_path / "c", 0.05).changes) == 4


def test_a_change_between_single_steps_is_neither_slower_nor_faster(tmp_path: Path) -> None:
    for side, compute in (("a", 4.0), ("b", 8.0)):
        make_run(tmp_path / side, Conditions(compute=compute), mode="ring", steps=3, **LINK)
    done = CliRunner().invoke(app, ["compare", *sides(tmp_path)])
    assert done.exit_code == 0 and "too few steps" in done.output and "worse:" not in done.output


def sides(folder: Path) -> list[str]:
    return [str(folder / "a"), str(folder / "b")]


@pytest.mark.parametrize(("repeats", "times"), [((1, 2), 1), ((1, 1), 1), ((2, 2), 0)])
def test_the_note_on_single_runs_is_printed_once(tmp_path: Path, repeats: tuple[int, int], times: int) -> None:
    for side, count in zip(("a", "b"), repeats, strict=True):
        for mode in ("ring", "ddp"):
            for number in range(count):
                make_run(tmp_path / side / f"{mode}-{number}", Conditions(seed=number), mode=mode, **LINK)
    said = " ".join(CliRunner().invoke(app, ["compare", *sides(tmp_path)]).output.split())
    assert said.count("not the differences between runs") == times


def test_results_without_a_common_spec_are_refused(tmp_path: Path) -> None:
    results(tmp_path / "a", 4.0)
    for mode in ("tree", "gather"):
        make_run(tmp_path / "b" / mode, mode=mode, **LINK)
    with pytest.raises(UsageError, match="no run of equal spec"):
        compare(tmp_path / "a", tmp_path / "b", 0.05)


@pytest.mark.parametrize("status", ["failed", "invalid", None])
def test_a_run_that_b_lost_is_worse_unless_it_may_be_missing(tmp_path: Path, status: str | None) -> None:
    a, b = results(tmp_path / "a", 4.0), results(tmp_path / "b", 4.0)
    for folder in (a, b):
        lost = status if folder is b else "ok"
        if lost:
            make_run(folder / "tree", mode="tree", status=lost, reason="rank 2 died", **LINK)
    done = CliRunner().invoke(app, ["compare", str(a), str(b)])
    why = f"{status}: rank 2 died" if status else "not there"
    assert done.exit_code == 1 and f"lost in B: tree: {why}" in done.output
    assert CliRunner().invoke(app, ["compare", str(a), str(b), "--allow-missing"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", str(b), str(a)]).exit_code == 0  # B may have more than A


def test_ratios_of_bytes_and_losses_are_printed(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    make_run(a, Conditions(accuracy=0.5), mode="ring", **LINK)
    make_run(b, Conditions(accuracy=0.25), mode="ring/fp16", **LINK)
    lines = CliRunner().invoke(app, ["compare", str(a), str(b)]).output.splitlines()
    (row,) = [line for line in lines if line.startswith("| a -> b")]
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == ["0.500", "1.800", "2.050"]


def test_with_json_the_output_is_one_document(tmp_path: Path) -> None:
    a, b = results(tmp_path / "a", 4.0), results(tmp_path / "b", 5.2)
    document = json.loads(CliRunner().invoke(app, ["compare", str(a), str(b), "--json"]).stdout)
    assert document["worse"] == ["ddp", "ring"] or document["worse"] == ["ring", "ddp"]
