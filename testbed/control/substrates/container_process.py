"""A process that the engine runs in a container, with the calls of any other process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError

from testbed.spec.privileges import without_privileges


class ContainerProcess:
    """A process exec'd in a container without any privilege, as user `who`; a thread keeps its output."""

    def __init__(
        self,
        client: docker.DockerClient,
        container: Any,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        who: tuple[int, int],
    ) -> None:
        self._api = client.api
        self._container = container
        self._user = f"{who[0]}:{who[1]}"
        self._mark = f"/tmp/pid-{time.monotonic_ns()}"  # the process writes its own number there: ours differs
        wrapped = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', self._mark, *without_privileges(*who), *argv]
        self._id = self._api.exec_create(container.id, wrapped, environment=dict(env), user="0")["Id"]
        self._code: int | None = None
        self.pid = 0
        self._thread = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._thread.start()

    def _copy(self, log: Path) -> None:
        with contextlib.suppress(APIError, OSError), log.open("ab") as out:
            for chunk in self._api.exec_start(self._id, stream=True):
                out.write(chunk)
                out.flush()

    def poll(self) -> int | None:
        """The exit code, negative for a signal as subprocess has it; None while it runs."""
        if self._code is None and not self._thread.is_alive():
            code = self._inspect()
            self._code = code if code is None or code <= 128 else 128 - code
        return self._code

    def _inspect(self) -> int | None:
        try:
            found = self._api.exec_inspect(self._id)
        except APIError:
            return 137  # the container went away, and the process with it
        return None if found["Running"] else int(found["ExitCode"] if found["ExitCode"] is not None else 137)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"process in {self._container.name} still runs after {timeout} s")
            time.sleep(0.05)
        return code

    def signal(self, signum: int) -> None:
        """Send a signal from inside, as the process's own user: the container's root lacks the right to."""
        if self.poll() is None:
            kill = ["sh", "-c", f'kill -{int(signum)} "$(cat "$0")"', self._mark]
            with contextlib.suppress(APIError):
                self._container.exec_run(kill, user=self._user)
