"""A rank reaches its peers and nothing outside its network. All addresses in these tests are this machine's own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.compose import ComposeSubstrate
from tests.docker.cluster import QUICK, Cluster, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
USER = 12345
# Print which of these a process reaches: addresses with a port, and a name.
REACH = """
import json, socket, sys

def reaches(target):
    host, _, port = target.partition(":")
    try:
        if not port:
            return bool(socket.gethostbyname(host))
        socket.create_connection((host, int(port)), timeout=5).close()
        return True
    except OSError:
        return False

print(json.dumps([reaches(target) for target in sys.argv[1:]]))
"""


class Listener:
    """A listener on an address of this machine; it keeps the first line of each connection and closes it."""

    def __init__(self, address: str) -> None:
        self.lines: list[str] = []
        self._socket = socket.create_server((address, 0))
        self.where = "{}:{}".format(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    self.lines.append(connection.recv(1024).partition(b"\r")[0].decode(errors="replace"))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


def gateway_of(network: str) -> str:
    """The address that the host has in a network of the engine."""
    form = "{{(index .IPAM.Config 0).Gateway}}"
    argv = ["docker", "network", "inspect", "--format", form, network]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture
def outside(image: str, tmp_path: Path) -> Iterator[Listener]:
    """A listener in a network of the engine that no rank belongs to."""
    name = f"testbed-outside-{tmp_path.name}"
    subprocess.run(["docker", "network", "create", name], check=True, capture_output=True, timeout=60)
    try:
        with contextlib.closing(Listener(gateway_of(name))) as listener:
            yield listener
    finally:
        subprocess.run(["docker", "network", "rm", name], check=True, capture_output=True, timeout=60)


def test_a_rank_of_up_reaches_its_peers_and_nothing_else_once_rank_0_has_looked_for_data(
    outside: Listener, tmp_path: Path
) -> None:
    """The listener is the proxy of rank 0, so the request of the download arrives there and goes no further."""
    cluster = Cluster(tmp_path / "clone", owner=USER)
    proxied = {"services": {"rank0": {"environment": {"https_proxy": f"http://{outside.where}"}}}}
    (cluster.folder / "compose.override.yaml").write_text(json.dumps(proxied))  # JSON is YAML
    try:
        cluster.start(DATA="mnist", STEPS="100000")
        wait_for(lambda: cluster.steps(0) >= 1, "a step of rank 0")
        assert any(line.startswith("CONNECT ") for line in outside.lines), "rank 0 tried to fetch the data"
        asked = len(outside.lines)
        inspect = cluster.compose("exec", "-T", "rank0", "hostname", "-i")
        rank_0 = inspect.stdout.split()[0]
        with contextlib.closing(Listener(gateway_of(f"{cluster.project()}_cluster"))) as host:
            for rank in ("rank0", "rank1"):
                targets = [f"{rank_0}:29500", outside.where, host.where, "rank2"]
                argv = ["exec", "-T", "--user", str(USER), rank, "python3", "-c", REACH, *targets]
                done = cluster.compose(*argv)
                assert json.loads(done.stdout) == [True, False, False, False], done.stderr
            assert host.lines == [] and len(outside.lines) == asked
        undo = cluster.compose("exec", "-T", "rank1", "setpriv", "--reuid", "12345", "ip", "route", "flush", "all")
        assert undo.returncode != 0
    finally:
        cluster.down()


def test_a_container_that_compose_yaml_did_not_start_keeps_its_routes(image: str, tmp_path: Path) -> None:
    """It may have the network of the host."""
    (tmp_path / "runs").mkdir()
    may = [word for cap in ("NET_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN") for word in ("--cap-add", cap)]
    env = [word for pair in ({**QUICK, "MODE": "single", "NODES": "1"}).items() for word in ("-e", "=".join(pair))]
    script = ["-c", "python3 docker/entrypoint.py && ip route"]
    argv = ["docker", "run", "--rm", "--cap-drop", "ALL", *may, *env, "-v", f"{tmp_path / 'runs'}:/runs"]
    done = subprocess.run([*argv, "--entrypoint", "sh", image, *script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "default via" in done.stdout, done.stdout + done.stderr


def test_a_rank_of_a_controller_reaches_its_peers_and_nothing_else(outside: Listener, tmp_path: Path) -> None:
    with ComposeSubstrate([NodePlan(name=f"node{k}") for k in range(2)], tmp_path / "runs/r") as substrate:
        serving = ["python3", "-m", "http.server", "8000", "--bind", substrate.nodes[0].address]
        server = substrate.start(0, serving, {}, tmp_path / "server.log")
        peer = f"{substrate.nodes[0].address}:8000"
        with contextlib.closing(Listener(gateway_of(f"{substrate._project}_cluster"))) as host:

            def reached() -> list[bool]:
                log = tmp_path / "reach.log"
                log.unlink(missing_ok=True)
                targets = [peer, outside.where, host.where, "rank0"]
                assert substrate.start(1, ["python3", "-c", REACH, *targets], {}, log).wait(60) == 0, log.read_text()
                found: list[bool] = json.loads(log.read_text())
                return found

            wait_for(lambda: reached()[0], "the peer to listen")
            assert reached() == [True, False, False, False]
            assert host.lines == [] and outside.lines == []
        assert server.poll() is None
