"""Hosts that answer commands by a function, for tests of the code above SSH."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

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
