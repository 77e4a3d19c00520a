"""Hosts that answer commands by a function, for tests of the code above SSH."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import paramiko

from testbed.control.substrates.docker_cli import local_user
from testbed.control.substrates.hosts.ssh import Host
from testbed.spec.errors import HostCommandFailed
from testbed.spec.inventory import HostNode

Answer = Callable[[Sequence[str]], str]


class ScriptedHost(Host):
    """Answers commands by `answer`; an exception raised there is the command's failure. `commands` has them all."""

    def __init__(self, answer: Answer, name: str = "node0", **node: object) -> None:
        super().__init__(HostNode.model_validate({"name": name, "address": "192.0.2.1"} | node))
        self.answer = answer
        self.commands: list[list[str]] = []

    def run(self, argv: Sequence[str], timeout_s: float) -> str:
        self.commands.append(list(argv))
        return self.answer(argv)


def silent(argv: Sequence[str]) -> str:
    """Every command succeeds without output."""
    return ""


def failing(code: int, output: str) -> Answer:
    """Every command fails like this."""

    def answer(argv: Sequence[str]) -> str:
        raise HostCommandFailed(f"node0: {argv[0]}: {output}", code, output)

    return answer


class LocalFiles:
    """An SFTP session on the local file system."""

    def __init__(self) -> None:
        self._closing = contextlib.ExitStack()

    def open(self, path: str, mode: str) -> object:
        file = self._closing.enter_context(Path(path).open(mode))  # noqa: SIM115 - `close` closes it
        calls = {"seek": file.seek, "read": file.read, "close": file.close}
        return type("File", (), {"stat": lambda _: Path(path).stat(), **calls})()

    def close(self) -> None:
        self._closing.close()


RUN = "ring-n2-abc123"


class Machine(ScriptedHost):
    """A host whose home is a folder, and whose engine has these containers: (id, rank, purpose, state, code, user)."""

    def __init__(self, home: Path, name: str, containers: Sequence[tuple[str, int, str, str, int, str]] = ()) -> None:
        super().__init__(self._answer, name)
        self.home, self.containers = home, list(containers)
        self.run_dir = home / ".testbed" / "runs" / RUN

    def files(self) -> paramiko.SFTPClient:
        files = LocalFiles()
        files.get = lambda there, here: shutil.copy(there, here)  # type: ignore[attr-defined]
        files.stat = lambda there: Path(there).stat()  # type: ignore[attr-defined]
        return files  # type: ignore[return-value]

    def _answer(self, argv: Sequence[str]) -> str:
        match list(argv):
            case ["sh", "-c", script, *_] if "id -u" in script:
                return f"1000\n1000\n{self.home}\n"
            case ["docker", "version", *_]:
                return "28"
            case ["docker", "ps", *rest] if "{{json .}}" in rest:
                return "\n".join(map(self._listed, self.containers))
            case ["docker", "ps", *rest] if f"label=testbed.user={local_user()}" in rest:
                return "\n".join(each[0] for each in self.containers if each[5] == local_user())
            case ["docker", "ps", *_]:
                return "\n".join(each[0] for each in self.containers)
            case ["docker", "inspect", *_, container]:
                return next(f"{each[3]} {each[4]}" for each in self.containers if each[0] == container)
            case ["docker", "rm", "--force", "--volumes", *ids]:
                self.containers = [each for each in self.containers if each[0] not in ids]
                return ""
            case ["docker", "image", *_]:
                return ""
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise HostCommandFailed(f"{self}: {argv[0]}", done.returncode, done.stderr)
        return done.stdout

    @staticmethod
    def _listed(container: tuple[str, int, str, str, int, str]) -> str:
        name, rank, purpose, *_, owner = container
        labels = f"testbed=hosts,testbed.run={RUN},testbed.rank={rank},testbed.purpose={purpose},testbed.user={owner}"
        return json.dumps({"ID": name, "Labels": labels})
