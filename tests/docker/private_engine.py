"""A second Docker engine that a test may kill: docker/engine.sh with files and a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from testbed.control.machine import ownership
from testbed.control.machine.user_namespace import NAMED
from tests.docker.cluster import ROOT, wait_for
from tests.support.processes import state

START_TIMEOUT_S = 180.0


class PrivateEngine:
    """An engine in a temporary folder. `close` ends it and its containers, and removes its files."""

    def __init__(self) -> None:
        self._namespace = ownership.owned_name("engine")
        self.folder = Path(tempfile.gettempdir()) / self._namespace
        self.folder.mkdir()
        subprocess.run(["ip", "netns", "add", self._namespace], check=True)
        subprocess.run(["ip", "-netns", self._namespace, "link", "set", "lo", "up"], check=True)
        self.host = f"unix://{self.folder}/docker.sock"

    def start(self) -> None:
        """Start the engine and wait until it answers. (`ip netns exec` would hide the cgroups.)"""
        self._script()

    def stop(self) -> None:
        """End the engine as a service manager does, with its containers."""
        self._script("stop")

    def kill(self) -> None:
        """Kill dockerd and containerd, as a lack of memory may; containers go on."""
        for file in ("testbed-engine.pid", "docker/containerd/containerd.pid"):
            pid = int((self.folder / file).read_text())
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: state(pid) in ("", "Z"), "the engine to end")

    def load(self, image: str) -> None:
        """Copy an image of the machine's engine."""
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as save:
            subprocess.run(["docker", "--host", self.host, "load", "--quiet"], stdin=save.stdout, check=True)
        assert save.returncode == 0

    def close(self) -> None:
        """End what is left of the engine, and remove its files."""
        try:
            self.start()  # a killed engine cannot end its containers, the next one does
            self.stop()
        finally:
            ownership.remove_namespace(self._namespace)
            for mount in reversed(_mounts(self.folder)):
                subprocess.run(["umount", "--lazy", mount], check=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _script(self, *argv: str) -> None:
        command = ["nsenter", f"--net={NAMED / self._namespace}", str(ROOT / "docker/engine.sh"), *argv]
        env = os.environ | {"ENGINE_FOLDER": str(self.folder)}
        log = self.folder / "script.log"
        with log.open("ab") as output:  # not a pipe, which the engine would keep open
            done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=START_TIMEOUT_S)
        assert done.returncode == 0, log.read_text()


def _mounts(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{folder}/")]
