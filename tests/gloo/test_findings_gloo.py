"""Findings about real scripts on real ranks: each planted fault is found with its line, look-alikes are silent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.report.script_findings import find
from testbed.results.gradients import gradient_fit, gradient_fits
from testbed.results.observations import Finding
from testbed.results.records import Step, read
from testbed.spec.run import RunSpec
from testbed.spec.script import ScriptSpec
from tests.support.command import run_command
from tests.support.observed import run_ranks

pytestmark = pytest.mark.gloo
SCRIPTS = Path(__file__).parents[1] / "scripts"
BY_HAND = (SCRIPTS / "gather_scatter.py").read_text().splitlines()


def observe(folder: Path, name: str, nodes: int = 2, **variables: str) -> dict[str, Finding]:
    """Run a script in `folder` and return its findings by rule."""
    for each in (name, "common.py"):
        shutil.copy(SCRIPTS / each, folder / each)
    flags = [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
    common = ["--nodes", str(nodes), "--on", "process", "--share", "--set", "probe=false", "--out", "r", "--json"]
    done = run_command("exec", *common, *flags, "--", "python", name, cwd=folder)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["status"] == "ok"
    assert json.loads((folder / "r" / "summary.json").read_text())["findings"] == summary["findings"]
    return {each["rule"]: Finding(**each) for each in summary["findings"]}


def observe_forked(folder: Path, name: str, nodes: int = 2, **variables: str) -> dict[str, Finding]:
    """The findings by rule about a script in ranks that are forked, without a controller."""
    ranks = run_ranks(folder, name, ranks=nodes, variables=variables)
    assert [rank.code for rank in ranks] == [0] * nodes, ranks[0].output
    script = ScriptSpec(argv=["python", name], folder=str(SCRIPTS))
    spec = RunSpec(mode="script", script=script, nodes=nodes, batch=nodes)
    found = find({number: rank.records for number, rank in enumerate(ranks)}, spec)
    return {finding.rule: finding for finding in found}


def errors(found: dict[str, Finding]) -> list[str]:
    return [rule for rule, finding in found.items() if finding.severity == "error"]


def line_of(text: str) -> str:
    (number,) = [number for number, line in enumerate(BY_HAND, start=1) if line.strip() == text]
    return f"gather_scatter.py:{number}"


@pytest.mark.parametrize(
    ("fault", "rule", "says", "line"),
    [
        ("none at all", "not_synchronised", "Gradients are not synchronised", "optimizer.step()"),
        ("late", "not_synchronised", "after the optimizer", "dist.gather(parameter.grad, parts)"),
        ("no scatter", "not_synchronised", "Only rank 0 gets the mean", "optimizer.step()"),
        ("sum", "summed", "summed over 3 ranks", "dist.gather(parameter.grad, parts)"),
        ("twice", "divided_twice", "divided by 3 twice", "dist.gather(parameter.grad, parts)"),
        ("factor", "wrong_factor", "1.5 times the mean", "dist.gather(parameter.grad, parts)"),
        ("data", "same_data", "Ranks 0, 1 and 2 train on the same data", "for images, labels in loader:"),
        ("start", "different_start", "start with different parameters", "optimizer.step()"),
        ("drift", "replicas_drift", "Replicas drift apart", "optimizer.step()"),
        ("zero", "zero_gradients", "zero on ranks 0, 1 and 2", "optimizer.step()"),
    ],
)
def test_a_planted_fault_is_found_with_its_line(tmp_path: Path, fault: str, rule: str, says: str, line: str) -> None:
    found = observe_forked(tmp_path, "gather_scatter.py", nodes=3, SCRIPT_FAULT=fault)
    assert errors(found) == [rule]
    assert says in found[rule].title and found[rule].site == line_of(line)


def test_a_correct_script_has_the_plain_mean_and_no_error(tmp_path: Path) -> None:
    assert errors(observe(tmp_path, "gather_scatter.py", nodes=3)) == []
    records = {rank: list(read(tmp_path / "r" / f"rank{rank}.jsonl")) for rank in range(3)}
    fit = gradient_fit(records)
    assert fit.is_mean and fit.samples == 4
    assert fit.factor == pytest.approx(1.0, abs=1e-6) and fit.residual < 1e-6
    sampled = [step.step for step in records[0] if isinstance(step, Step) and step.observing > 0]
    assert set(sampled) == {0, 1, 2, 3, 4, 7}  # parameters are hashed when the next step begins


def test_costs_of_a_ddp_script_are_found_and_no_error(tmp_path: Path) -> None:
    costs = "accumulate again metric unused threads"
    found = observe(tmp_path, "ddp_costs.py", SCRIPT_STEPS="13", SCRIPT_COSTS=costs)
    assert errors(found) == []
    wanted = {"no_no_sync", "reduced_twice", "metric_every_step", "needless_unused_search", "unequal_threads"}
    assert wanted <= set(found)
    assert all(found[rule].site.startswith("ddp_costs.py:") for rule in wanted - {"unequal_threads"})


def test_costs_of_a_hand_written_script_are_found_with_their_lines(tmp_path: Path) -> None:
    """Each is many times as large as its limit, so that other processes of the machine make no difference."""
    found = observe_forked(tmp_path, "costs_by_hand.py")
    assert {rule: finding.severity for rule, finding in found.items()} == dict.fromkeys(
        ("no_overlap", "rank_works_alone", "tiny_collectives"), "cost"
    )
    lines = (SCRIPTS / "costs_by_hand.py").read_text().splitlines()
    sites = {rule: lines[int(finding.site.partition(":")[2]) - 1].strip() for rule, finding in found.items()}
    assert sites["no_overlap"] == "dist.all_reduce(flat)" and sites["tiny_collectives"] == "dist.all_reduce(each)"
    assert sites["rank_works_alone"] == "model.eval()"


def test_a_missing_set_epoch_is_found(tmp_path: Path) -> None:
    found = observe(tmp_path, "ddp_costs.py", SCRIPT_STEPS="13", SCRIPT_COSTS="epoch")
    assert errors(found) == ["no_set_epoch"] and "3 whole passes over 32" in found["no_set_epoch"].evidence


def test_a_script_that_never_joins_a_group_is_found(tmp_path: Path) -> None:
    assert errors(observe(tmp_path, "alone.py")) == ["never_joined"]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("local_sgd.py", {}),
        ("gan.py", {}),
        ("clipping.py", {}),
        ("clipping.py", {"SCRIPT_CLIPS": "by hand"}),
        ("sharded.py", {}),
        ("peeked.py", {}),
        ("uneven.py", {}),
        ("ddp_costs.py", {"SCRIPT_STEPS": "13"}),
        ("evaluates.py", {}),
    ],
    ids=[
        *("local SGD", "GAN", "clipping", "clipping by hand", "FSDP", "peeked batch", "uneven last batch", "DDP"),
        "DDP that accumulates and clips",
    ],
)
def test_a_look_alike_has_no_error(tmp_path: Path, name: str, variables: dict[str, str]) -> None:
    found = observe_forked(tmp_path, name, **variables)
    assert errors(found) == []
    true_costs = {"gan.py": {"no_no_sync"}, "uneven.py": {"metric_every_step"}}.get(name, set())
    assert set(found) - {"rank_works_alone", "tiny_collectives"} <= true_costs  # both depend on the machine


STYLES = ("accumulate", "ema", "warmup", "mixed", "autocast", "metric", "stop", "fp16", "flat", "turns", "clip")


@pytest.mark.parametrize("style", STYLES)
def test_a_correct_style_has_no_error_and_only_true_costs(tmp_path: Path, style: str) -> None:
    ranks = run_ranks(tmp_path, "styles.py", variables={"SCRIPT_STYLE": style})
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    assert [rank.unseen for rank in ranks] == [[], []]
    script = ScriptSpec(argv=("python", "styles.py"), folder=str(tmp_path))
    found = find({k: rank.records for k, rank in enumerate(ranks)}, RunSpec(nodes=2, mode="script", script=script))
    of_synchronisation = {each.rule for each in found} - {"metric_every_step", "rank_works_alone", "tiny_collectives"}
    assert of_synchronisation <= ({"no_overlap"} if style in ("mixed", "fp16", "flat", "turns") else set())
    assert ("metric_every_step" in {each.rule for each in found}) == (style == "stop")
    fits = gradient_fits({k: rank.records for k, rank in enumerate(ranks)})
    assert {fit.kind for fit in fits} == {"mean"} and len(fits) >= 5


def test_forked_ranks_of_all_nodes_are_compared(tmp_path: Path) -> None:
    assert observe(tmp_path, "many_ranks.py") == {}
    assert len(list((tmp_path / "r").glob("rank*.jsonl"))) == 4
    shutil.move(tmp_path / "r", tmp_path / "correct")
    found = observe(tmp_path, "many_ranks.py", SCRIPT_FAULT="data")
    assert errors(found) == ["same_data"] and "Ranks 0, 1, 2 and 3" in found["same_data"].title


def test_nodes_that_fork_groups_of_their_own_are_not_compared_with_each_other(tmp_path: Path) -> None:
    found = observe(tmp_path, "many_ranks.py", SCRIPT_GROUP="node")
    assert errors(found) == [] and "2 ranks that node 0 has forked" in found["not_compared"].evidence


def test_findings_are_printed_below_the_table(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "gather_scatter.py", tmp_path)
    flags = ["--nodes", "2", "--on", "process", "--share", "--set", "probe=false", "--env", "SCRIPT_FAULT=sum"]
    done = run_command("exec", *flags, "--out", "r", "--", "python", "gather_scatter.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert "summed over 2 ranks" in line and line_of("dist.gather(parameter.grad, parts)") in line
