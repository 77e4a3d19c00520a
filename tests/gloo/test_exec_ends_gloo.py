"""However a script ends, a sentence says why, nothing is left running, and what was measured is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from testbed.control.machine import ownership
from testbed.results.records import Step, read
from tests.support.command import start_command, wait_for_steps

pytestmark = pytest.mark.gloo
SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMON = ["--nodes", "2", "--on", "process", "--set", "probe=false", "--share", "--out", "r"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "{world}", "--nproc-per-node", "1"]
TORCHRUN += ["--node-rank", "{rank}", "--master-addr", "{master}", "--master-port", "{port}"]


CONTROLLERS: set[int] = set()  # pids of those that these tests have started


def script(folder: Path, content: str) -> None:
    (folder / "main.py").write_text(content)


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    controller = start_command("exec", *COMMON, *argv, cwd=folder)
    CONTROLLERS.add(controller.pid)
    return controller


def execute(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    controller = start(folder, *before, "--", *(arguments or ("python", "main.py")))
    try:
        printed, said = controller.communicate(timeout=240)
    finally:
        controller.kill()
    return subprocess.CompletedProcess(controller.args, controller.returncode, printed, said)


def fails(folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    shutil.copy(SCRIPTS / "fails.py", folder)
    return execute(folder, "python", "fails.py", *words, before=before)


def reason(folder: Path) -> str:
    return str(json.loads((folder / "r" / "summary.json").read_text())["reason"])


def left(folder: Path) -> list[str]:
    """What is left of a run in this folder: processes by their mark or their folder, working copies."""
    copies = [str(path) for path in Path(tempfile.gettempdir()).glob("testbed-*-script-*") if _of_this_file(path)]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(folder).encode() in words and entry.name != str(os.getpid()):
            found.append(words.replace(b"\0", b" ").decode())
    return found + copies


def _of_this_file(path: Path) -> bool:
    match = ownership.OWNED_NAME.fullmatch(path.name)
    return match is not None and int(match[1].partition("-")[0]) in CONTROLLERS


def orphans(owner: int) -> list[int]:
    """Live processes with the mark of a controller."""
    return [pid for pid, mark in ownership.owned_processes().items() if mark.startswith(f"{owner}-")]


def test_the_rank_that_died_first_is_named_with_its_own_words(tmp_path: Path) -> None:
    done = fails(tmp_path, "raise", "1")
    assert done.returncode == 3
    said = r"rank 1 \(node1\) ended with code 1 after step 4: ValueError: rank 1 stops here\."
    # On a busy machine rank 0 may be ended before it notices.
    assert re.search(said + r"( Then rank 0 lost it\.)? See r/rank1\.log", done.stderr), done.stderr
    assert len([each for each in read(tmp_path / "r" / "rank1.jsonl") if isinstance(each, Step)]) == 4
    assert (tmp_path / "r" / "rank1.files" / "steps.txt").read_text().count("rank 1") == 4
    assert bytes(range(256)) in (tmp_path / "r" / "rank1.log").read_bytes()
    assert reason(tmp_path) in done.stderr and left(tmp_path) == []


def test_workers_of_torchrun_end_with_it_and_are_named(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "fails.py", tmp_path)
    done = execute(tmp_path, *TORCHRUN, "fails.py", "raise", "0")
    assert done.returncode == 3
    assert "rank 0 (node0) ended with code 1 after step 4: ValueError: rank 0 stops here." in done.stderr
    assert left(tmp_path) == []


def test_a_script_that_hangs_is_ended_after_the_deadline(tmp_path: Path) -> None:
    done = fails(tmp_path, "hang", "1", before=("--deadline", "5"))
    assert done.returncode == 3
    assert "no rank made a step for 5 s. If the script needs longer, give --deadline SECONDS." in done.stderr
    assert "rank 1 (node1) is behind, after 4 steps, at fails.py:" in done.stderr
    assert len([each for each in read(tmp_path / "r" / "rank1.jsonl") if isinstance(each, Step)]) == 4
    assert left(tmp_path) == []


@pytest.mark.quiet  # a run of another test kills what dead controllers left, before it has removed its files
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_controller_leaves_nothing(tmp_path: Path, signum: signal.Signals) -> None:
    shutil.copy(SCRIPTS / "fails.py", tmp_path)
    controller = start(tmp_path, "--", *TORCHRUN, "fails.py", "never", "0")
    wait_for_steps(tmp_path / "r", 0, 3)
    assert orphans(controller.pid)
    controller.send_signal(signum)
    _, error = controller.communicate(timeout=60)
    if signum != signal.SIGKILL:
        assert controller.returncode == 130 and "What was measured is in r" in error
        assert (tmp_path / "r" / "rank1.files" / "steps.txt").exists()
    deadline = time.monotonic() + 60  # the launchers end by themselves when the controller is gone
    while (orphans(controller.pid) or left(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert orphans(controller.pid) == [] and left(tmp_path) == []


def test_the_requested_steps_are_enough(tmp_path: Path) -> None:
    done = fails(tmp_path, "never", "0", before=("--steps", "5", "--json"))
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert len(summary["losses"]) == 5 and left(tmp_path) == []


def test_nodes_that_never_meet_are_called_alone(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "plain.py", tmp_path)
    done = execute(tmp_path, "python", "plain.py")
    assert done.returncode == 0, done.stderr
    assert "plain.py: it made no process group of 2: every node trains alone." in done.stdout


def test_an_end_before_the_first_step_is_explained(tmp_path: Path) -> None:
    script(tmp_path, "print('nothing to do')")
    done = execute(tmp_path)
    assert done.returncode == 3
    assert "ended with code 0 before its first step: no step of an optimizer" in done.stderr
    assert "its last line is: nothing to do" in done.stderr


def test_the_scripts_own_code_and_last_line_are_in_the_message(tmp_path: Path) -> None:
    script(tmp_path, "import os, sys; print('only 4 ranks are accepted', file=sys.stderr); sys.exit(9)")
    done = execute(tmp_path)
    assert done.returncode == 3
    assert "ended with code 9 before its first step: only 4 ranks are accepted" in done.stderr


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import sys; sys.modules['torch'] = None\ntry:\n    import torch\nexcept ImportError:\n"
        "    raise ModuleNotFoundError(\"No module named 'torch'\")",
    )
    done = execute(tmp_path)
    assert done.returncode == 3
    assert (
        "has no torch. Activate the environment that has it" in done.stderr and f"{Path(sys.executable)}" in done.stderr
    )


def test_a_gigabyte_of_output_is_bounded(tmp_path: Path) -> None:
    script(
        tmp_path, "import sys\nfor _ in range(1024): sys.stdout.buffer.write(b'x' * (1 << 20))\nsys.exit('last line')"
    )
    done = execute(tmp_path, before=("--nodes", "1"))
    assert done.returncode == 3 and "ended with code 1 before its first step: " in done.stderr
    log = tmp_path / "r" / "rank0.log"
    assert log.stat().st_size < 70 << 20 and log.read_bytes().endswith(b"last line\n")
    assert b"1.1 GB of output, and a log has at most 67.1 MB" in log.read_bytes()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["python", "nope.py"], "script 'nope.py': there is no such file in"),
        (["no-such-python", "main.py"], "command 'no-such-python': there is no such command"),
        (["python", "main.py", "{rang}"], "placeholder '{rang}': is not known. Known: {rank}, {world}"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is_made(
    tmp_path: Path, argv: list[str], sentence: str
) -> None:
    script(tmp_path, "")
    done = execute(tmp_path, *argv)
    assert done.returncode == 2 and sentence in done.stderr and not (tmp_path / "r").exists()
