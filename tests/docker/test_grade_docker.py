"""`testbed grade` in containers: model solutions, wrong ones, and a submission that tries to leave its sandbox."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from testbed.spec.errors import Interrupted
from tests.docker.test_isolation import Listener, gateway_of
from tests.support.command import run_command, start_command
from tests.support.processes import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
COURSE, SCRIPTS = ROOT / "course", ROOT / "tests" / "scripts"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((COURSE / "wrong" / "expected.toml").read_text())
PARTS = {part["name"]: part for part in tomllib.loads((COURSE / "assignment2.toml").read_text())["parts"]}


def grade(folder: Path, assignment: Path, submissions: Path, timeout: float = 1500) -> dict[str, dict[str, Any]]:
    """The results by submission; they are in the files and in what --json prints."""
    done = run_command(
        "grade", str(assignment), str(submissions), "--share", "--out", "out", "--json", cwd=folder, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads((folder / "out" / "results.json").read_text()) == document and document["complete"]
    return {each["name"]: each for each in document["submissions"]}


def lost(result: dict[str, Any], part: str) -> list[str]:
    """The demands of a part that gave no points."""
    return [each["kind"] for each in result["verdicts"] if each["part"] == part and each["points"] < each["of"]]


def no_containers(folder: Path) -> bool:
    """True if no container is left that has something of this folder mounted."""
    argv = ["docker", "ps", "--all", "--no-trunc", "--format", "{{.Mounts}}"]
    mounts = subprocess.run(argv, capture_output=True, check=True, text=True, timeout=60).stdout
    return str(folder) not in mounts


@pytest.mark.quiet
def test_the_model_solutions_get_every_point(tmp_path: Path) -> None:
    """On a machine that others use an order of speed may not be proven; all else is as expected every time."""
    for attempt in range(2):
        (tmp_path / str(attempt)).mkdir()
        result = grade(tmp_path / str(attempt), COURSE / "assignment2.toml", COURSE / "solutions")["model"]
        if {each["kind"] for each in result["verdicts"] if not each["points"]} != {"speed"}:
            break
    assert [(each["part"], each["kind"], each["reason"]) for each in result["verdicts"] if not each["points"]] == []
    assert result["points"] == result["of"] == 100
    outside = {each["kind"] for each in result["verdicts"] if each["evidence"] == "outside"}
    assert outside == {"bytes"}


def test_each_wrong_solution_loses_exactly_the_points_it_should(tmp_path: Path) -> None:
    results = grade(tmp_path, COURSE / "assignment2.toml", COURSE / "wrong")
    assert set(results) == set(EXPECTED) and len(EXPECTED) == 8
    found = {name: sorted(lost(results[name], row["part"])) for name, row in EXPECTED.items()}
    assert found == {name: sorted(row["lost"]) for name, row in EXPECTED.items()}
    for name, row in EXPECTED.items():
        assert lost(results[name], "1") == [], name
        own = {demand["kind"]: demand["points"] for demand in PARTS[row["part"]]["demands"]}
        given = {each["kind"]: each["points"] for each in results[name]["verdicts"] if each["part"] == row["part"]}
        assert given == {kind: 0 if kind in row["lost"] else points for kind, points in own.items()}, name
    text = (tmp_path / "out" / "results.md").read_text()
    assert "the sum over all ranks, not their mean" in text and "not met" in text
    assert no_containers(tmp_path)


def test_a_submission_that_tries_to_leave_its_sandbox_gets_nothing_and_is_named(tmp_path: Path) -> None:
    """Before and after it an honest submission gets its points: nothing of theirs was reached."""
    shutil.copytree(COURSE / "given", tmp_path / "given")
    text = (COURSE / "assignment2.toml").read_text()
    first = text[: text.index('[[parts]]\nname = "2a"')]
    (tmp_path / "one.toml").write_text(first)
    for name in ("ann", "mallory", "zoe"):
        (tmp_path / "in" / name).mkdir(parents=True)
        shutil.copy(COURSE / "solutions" / "model" / "part1.py", tmp_path / "in" / name)
    network = f"testbed-outside-{tmp_path.name}"
    subprocess.run(["docker", "network", "create", network], check=True, capture_output=True, timeout=60)
    try:
        with contextlib.closing(Listener(gateway_of(network))) as outside:
            bridge = gateway_of("bridge")
            targets = {
                "addresses": [outside.where, f"{bridge}:22", f"{bridge}:2375"],
                "paths": [
                    "/etc/shadow",
                    str(tmp_path / "in" / "ann"),
                    str(tmp_path / "out" / "001-ann"),
                    "/var/run/docker.sock",
                ],
            }
            (tmp_path / "in" / "mallory" / "targets.json").write_text(json.dumps(targets))
            shutil.copy(SCRIPTS / "escape.py", tmp_path / "in" / "mallory" / "part1.py")
            results = grade(tmp_path, tmp_path / "one.toml", tmp_path / "in")
            assert outside.lines == []
    finally:
        subprocess.run(["docker", "network", "rm", network], check=True, capture_output=True, timeout=60)
    mallory = results["mallory"]
    assert (
        mallory["points"] == 0 and mallory["of"] == 10 and {each["verdict"] for each in mallory["verdicts"]} != {"met"}
    )
    reasons = " ".join(each["reason"] for each in mallory["verdicts"])
    assert "to reach an address beyond its nodes" in reasons and "to exceed its limit of processes" in reasons
    assert results["ann"]["points"] == results["zoe"]["points"] == 10
    log = next((tmp_path / "out").glob("002-mallory/part-1/rank0.log")).read_text()
    found = json.loads(log.partition("FOUND ")[2].splitlines()[0])
    assert found["uid"] != 0 and not found["root"] and not found["mounts"]
    assert not found["launcher"] and not found["signals"] and not found["records"]
    assert found["network"] == found["files"] == found["writes"] == [] and 0 < found["children"] < 128
    assert no_containers(tmp_path)


def test_forged_records_are_not_proven_and_give_nothing(tmp_path: Path) -> None:
    """The records claim a perfect part 2b; the interfaces counted nothing."""
    (tmp_path / "in" / "forger").mkdir(parents=True)
    shutil.copy(SCRIPTS / "forger.py", tmp_path / "in" / "forger" / "part2b.py")
    result = grade(tmp_path, COURSE / "assignment2.toml", tmp_path / "in")["forger"]
    own = {each["kind"]: each for each in result["verdicts"] if each["part"] == "2b"}
    assert result["points"] == 0 and own.pop("bytes")["verdict"] == "not met"
    assert {each["verdict"] for each in own.values()} == {"not proven"}
    assert all("the interfaces of all nodes counted" in each["reason"] for each in own.values()), own


def test_ctrl_c_keeps_what_was_graded_and_leaves_no_container(tmp_path: Path) -> None:
    """The second submission never ends; SIGINT comes while its ranks run."""
    shutil.copytree(COURSE / "given", tmp_path / "given")
    text = (COURSE / "assignment2.toml").read_text()
    (tmp_path / "one.toml").write_text(text[: text.index('[[parts]]\nname = "2a"')])
    for name in ("ann", "endless"):
        (tmp_path / "in" / name).mkdir(parents=True)
    shutil.copy(COURSE / "solutions" / "model" / "part1.py", tmp_path / "in" / "ann")
    (tmp_path / "in" / "endless" / "part1.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(3600)\n")
    running = start_command("grade", "one.toml", "in", "--share", "--out", "out", cwd=tmp_path)
    log = tmp_path / "out" / "002-endless" / "part-1" / "rank0.log"
    try:
        until(lambda: running.poll() is not None or (log.exists() and "begun" in log.read_text()), 600)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == Interrupted.exit_code and "results.md" in errors, errors
    (graded,) = json.loads((tmp_path / "out" / "results.json").read_text())["submissions"]
    assert graded["name"] == "ann" and graded["points"] == 10
    assert "1 of 2 submissions were not graded" in (tmp_path / "out" / "results.md").read_text()
    assert no_containers(tmp_path)
