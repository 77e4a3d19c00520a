"""`docker compose up` and `testbed run --on compose` leave the same files with the same keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.spec.errors import NetworkInvalid
from tests.docker.cluster import Cluster
from tests.support.command import run_command
from tests.support.run_files import keys_by_file

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
BUSY = NetworkInvalid.exit_code  # if the machine was too busy for the probe; no link is measured after training then


@pytest.mark.quiet  # its network should be valid
def test_a_run_with_and_without_a_controller_leaves_the_same_files_and_keys(image: str, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    cluster = Cluster(tmp_path / "up")
    try:
        printed = cluster.up(RATE="100mbit", STEPS="5", BATCH="16", SET="", KEEP_GOING="true")
        codes = set(cluster.codes().values())
        assert codes <= {0, BUSY}, printed
    finally:
        cluster.down()
    (without,) = cluster.folders()
    flags = ["--nodes", "4", "--rate", "100mbit", "--steps", "5", "--batch", "16", "--model", "lenet5"]
    more = ["--data", "synthetic", "--set", "node.cpus=0.4", "--on", "compose", "--keep-going", "--out", "runs/r"]
    done = run_command("run", *flags, *more, cwd=tmp_path)
    assert done.returncode in (0, BUSY), done.stderr
    found = [keys_by_file(without), keys_by_file(tmp_path / "runs/r")]
    if codes | {done.returncode} != {0}:
        for keys in found:
            del keys["receipt.json"]["after"]
    assert found[0] == found[1]
