"""A process in a container, with the calls of any other process: `docker exec` stands for it on this side."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.control.substrates.process import run, spawn
from testbed.spec.errors import TestbedError
from testbed.spec.privileges import without_privileges

TIMEOUT = 30.0  # seconds to deliver a signal


class ContainerProcess:
    """Runs as user `who` without any privilege; `docker exec` copies its output and takes over its exit code."""

    def __init__(
        self, container: str, argv: Sequence[str], env: Mapping[str, str], log: Path, who: tuple[int, int]
    ) -> None:
        self._container = container
        self._user = f"{who[0]}:{who[1]}"
        self._mark = f"/tmp/pid-{time.monotonic_ns()}"  # the process writes its own number there: ours differs
        variables = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        wrapped = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', self._mark, *without_privileges(*who), *argv]
        self._exec = spawn(["docker", "exec", "--user", "0", *variables, container, *wrapped], {}, log)
        self.pid = self._exec.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal as subprocess has it; None while it runs."""
        return _as_subprocess(self._exec.poll())

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        code = _as_subprocess(self._exec.wait(timeout))
        assert code is not None
        return code

    def signal(self, signum: int) -> None:
        """Send a signal from inside, as the process's own user: the container's root lacks the right to."""
        if self._exec.poll() is None:
            kill = ["sh", "-c", f'kill -{int(signum)} "$(cat "$0")"', self._mark]
            with contextlib.suppress(TestbedError):  # it has ended meanwhile
                run(["docker", "exec", "--user", self._user, self._container, *kill], TIMEOUT)

    def forbid_writing(self) -> None:
        """No file of it may grow beyond one byte."""
        limit = ["sh", "-c", 'prlimit --pid "$(cat "$0")" --fsize=1', self._mark]
        run(["docker", "exec", "--user", self._user, self._container, *limit], TIMEOUT)

    def abandon(self) -> None:
        """The container is gone, or will be: nothing is left to wait for."""
        self._exec.signal(9)
        with contextlib.suppress(TimeoutError):
            self._exec.wait(TIMEOUT)


def _as_subprocess(code: int | None) -> int | None:
    """A shell's 128 + n, which `docker exec` passes on, is a death by signal n."""
    return code if code is None or code <= 128 else 128 - code
