"""The image under torchrun, like any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.hosts.nodes import command

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
RUN = {"MODE": "ring", "MODEL": "lenet5", "DATA": "synthetic", "BATCH": "32", "STEPS": "4"}


def test_torchrun_on_two_nodes(tmp_path: Path, image: str) -> None:
    """The readme's command except for the network: on one machine two nodes cannot both use the host's ports."""
    tag = f"testbed-launch-{os.getpid()}"
    names = [f"{tag}-{node}" for node in range(2)]
    variables = [word for key, value in RUN.items() for word in ("--env", f"{key}={value}")]
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", names[0], "--master-port", "29500"]
    tmp_path.chmod(0o777)
    command("docker", "network", "create", tag)
    try:
        for node, name in enumerate(names):
            where = ["--name", name, "--network", tag, "--volume", f"{tmp_path}:/runs", "--user", "65534:65534"]
            argv = ["--node-rank", str(node), *launch, "-m", "testbed.rank"]
            command("docker", "run", "--detach", *where, *variables, "--entrypoint", "torchrun", image, *argv)
        codes = [command("docker", "wait", name, timeout=200).strip() for name in names]
        output = command("docker", "logs", names[0])
    finally:
        command("docker", "rm", "--force", *names)
        command("docker", "network", "rm", tag)
    assert codes == ["0", "0"], output
    (folder,) = (tmp_path / "launched").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["substrate"], summary["replicas_agree"]) == ("ok", "launched", True)
    assert summary["counter"] == "interface eth0" and "| ring |" in output
