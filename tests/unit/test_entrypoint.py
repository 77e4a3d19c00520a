"""docker/entrypoint.py: what it does before anything of the container's network is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Execute the entrypoint, and send it SIGTERM while it imports the module that reads the request.
STOPPED_DURING_IMPORTS = f"""
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "testbed.rank.request":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
runpy.run_path({str(ROOT / "docker/entrypoint.py")!r}, run_name="__main__")
"""


def stopped_while_it_starts(runs: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "TESTBED_RUNS": str(runs), "DATA": "synthetic", **env}
    argv = [sys.executable, "-c", STOPPED_DURING_IMPORTS]
    return subprocess.run(argv, env=whole, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_rank_that_is_stopped_while_it_starts_still_refuses_a_bad_request(tmp_path: Path) -> None:
    """Compose stops all ranks when the first one has refused; the exit code of rank 0 is the script's."""
    done = stopped_while_it_starts(tmp_path, RATE="fast")
    assert (done.returncode, "'fast'" in done.stderr) == (2, True), done.stderr


@pytest.mark.net  # only root may drop privileges, which it does before it accepts a request
def test_a_rank_that_is_stopped_while_it_starts_makes_nothing_of_a_good_request(tmp_path: Path) -> None:
    done = stopped_while_it_starts(tmp_path, RATE="100mbit")
    assert (done.returncode, list(tmp_path.iterdir())) == (130, []), done.stderr
