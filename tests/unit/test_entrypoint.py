"""docker/entrypoint.py: what it does before anything of the container's network is changed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.control.substrates.clone import image_files
from testbed.net.tcp import congestion_controls
from testbed.spec.errors import Interrupted, NetworkInvalid, UsageError

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "docker/entrypoint.py"
stale_files = runpy.run_path(str(ENTRYPOINT))["stale_files"]  # `docker` is also the name of the engine's SDK
# Execute the entrypoint, and send it SIGTERM while it imports the module that reads the request.
STOPPED_DURING_IMPORTS = f"""
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "testbed.rank.request":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
runpy.run_path({str(ENTRYPOINT)!r}, run_name="__main__")
"""


def stopped_while_it_starts(runs: Path, *prefix: str, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "TESTBED_RUNS": str(runs), "DATA": "synthetic", **env}
    argv = [*prefix, sys.executable, "-c", STOPPED_DURING_IMPORTS]
    return subprocess.run(argv, env=whole, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_rank_that_is_stopped_while_it_starts_still_refuses_a_bad_request(tmp_path: Path) -> None:
    """Compose stops all ranks when the first one has refused; the exit code of rank 0 is the script's."""
    done = stopped_while_it_starts(tmp_path, RATE="fast")
    assert (done.returncode, "'fast'" in done.stderr) == (UsageError.exit_code, True), done.stderr


REFUSED = {  # variables: the message, in the words of `docker compose up`
    "batch": ({"BATCH": "10"}, "BATCH=10: must be divisible by the 4 ranks. Use 8 or 12.\n"),
    "congestion": (
        {"CONGESTION": "foo"},
        f"CONGESTION='foo': this kernel has no such TCP congestion control. "
        f"Use one of {', '.join(congestion_controls())}.\n",
    ),
    "runs": ({}, "./runs: No such file or directory. compose.yaml must mount it as /nowhere/runs.\n"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_in_the_words_of_docker_compose_up(case: str) -> None:
    variables, message = REFUSED[case]
    env = {**os.environ, "TESTBED_RUNS": "/nowhere/runs", "DATA": "synthetic", "NODES": "4", **variables}
    done = subprocess.run(
        [sys.executable, str(ENTRYPOINT)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (UsageError.exit_code, message)


OWN_NETWORK = ("unshare", "--net")  # a network without eth0


@pytest.mark.net  # only root may drop privileges, which it does before it accepts a request
def test_a_rank_that_is_stopped_while_it_starts_makes_nothing_of_a_good_request(tmp_path: Path) -> None:
    done = stopped_while_it_starts(tmp_path, *OWN_NETWORK, SHAPING="off")
    assert (done.returncode, list(tmp_path.iterdir())) == (Interrupted.exit_code, []), done.stderr


@pytest.mark.net
def test_a_rank_that_is_stopped_while_it_starts_still_says_that_its_network_cannot_be_shaped(tmp_path: Path) -> None:
    done = stopped_while_it_starts(tmp_path, *OWN_NETWORK, RATE="100mbit")
    assert (done.returncode, "cannot be shaped" in done.stderr) == (NetworkInvalid.exit_code, True), done.stderr


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The files of the image, made from the present code."""
    for path in image_files(ROOT):
        copy = tmp_path / "image" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path / "image"


def test_an_image_of_the_present_code_is_not_stale(unpacked: Path) -> None:
    assert stale_files(unpacked, ROOT) == []


def test_changed_new_and_removed_files_make_an_image_stale(unpacked: Path) -> None:
    (unpacked / "testbed/rank/train.py").write_text("older")
    (unpacked / "testbed/net/shaping.py").unlink()
    (unpacked / "testbed/spec/gone.py").write_text("no longer in the clone")
    assert stale_files(unpacked, ROOT) == ["testbed/net/shaping.py", "testbed/rank/train.py", "testbed/spec/gone.py"]


@pytest.mark.net  # root without capabilities, as in a container
def test_code_that_only_the_user_may_read_says_nothing(unpacked: Path) -> None:
    (unpacked / "testbed/rank/train.py").write_text("older")
    private = unpacked.parent / "clone"
    shutil.copytree(ROOT / "testbed", private / "testbed", ignore=shutil.ignore_patterns("__pycache__"))
    assert "testbed/rank/train.py" in stale_files(unpacked, private)
    os.chown(private / "testbed", 12345, 12345)
    (private / "testbed").chmod(0o700)
    code = f"""
import runpy
from pathlib import Path
print(runpy.run_path({str(ENTRYPOINT)!r})["stale_files"](Path({str(unpacked)!r}), Path({str(private)!r})))
"""
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_a_folder_without_the_code_says_nothing(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "clone/testbed").mkdir(parents=True)
    assert stale_files(unpacked, tmp_path / "clone") == []
