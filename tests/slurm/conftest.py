"""One cluster for the whole session, and a job that runs into its time limit meanwhile."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

SLEEPS = "import time\ntime.sleep(600)\n"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        found.up()
        yield found
    finally:
        found.down()


@pytest.fixture(scope="session")
def timed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> subprocess.Popen[str]:
    """A script that does not end, in a job of one minute, the shortest that Slurm has."""
    return start_sleeping(cluster, tmp_path_factory.mktemp("timed"), "--time", "1")


def start_sleeping(cluster: Cluster, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start `testbed exec` with a script that sleeps on two nodes, in `folder`; its run folder is r there."""
    (folder / "sleeps.py").write_text(SLEEPS)
    argv = ["exec", "--on", "slurm", "--nodes", "2", "--set", "probe=false", "--out", "r", *options]
    return cluster.start_testbed(*argv, "--", "python", "sleeps.py", cwd=folder)
