"""Processes that begin with torch imported: a server imports it once and forks, which takes milliseconds.

For tests of what a rank or a script does. How their interpreter starts is tested with real starts elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
IMPORTED = ("torch", "torch._dynamo", "testbed.rank.run")  # torch's optimizers import its compiler
START_TIMEOUT_S = 200.0  # long enough to import torch on a busy machine


class ForkedProcess:
    """A process of the server, with the methods of subprocess.Popen that tests use."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.codes.get(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._server.changed:
            ended = self._server.changed.wait_for(lambda: self.poll() is not None, timeout)
        if not ended or self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> ForkedProcess:
    """Run `python` with these arguments (a script, or -m and a module) and this environment; output goes to `log`."""
    return _server().fork({"argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log)})


@functools.cache
def _server() -> _Server:
    made = _Server()
    atexit.register(made.close)
    return made


class _Server:
    """The server's process, and the thread that reads what it says."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.codes: dict[int, int] = {}  # of processes that have ended
        self._started: list[int] = []
        self._lock = threading.Lock()
        fixed = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **fixed},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            said = json.loads(line)
            with self.changed:
                if "started" in said:
                    self._started.append(said["started"])
                else:
                    self.codes[said["ended"]] = said["code"]
                self.changed.notify_all()

    def fork(self, request: dict[str, Any]) -> ForkedProcess:
        assert self._process.stdin
        with self._lock, self.changed:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            assert self.changed.wait_for(lambda: self._started, START_TIMEOUT_S), "the server started no process"
            pid = self._started.pop()
            self.codes.pop(pid, None)  # of an earlier process with this number
            return ForkedProcess(self, pid)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()  # it ends then
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()


# --- in the server ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork for each line on stdin; say which process was started, and each that has ended with its code."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1024)
            _say_who_ended()
        if 0 not in ready:
            continue
        if not (read := os.read(0, 1 << 16)):
            return
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                _become(request)
            _say(started=pid)


def _say(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _say_who_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _say(ended=found[0], code=os.waitstatus_to_exitcode(found[1]))


def _become(request: dict[str, Any]) -> NoReturn:
    """Be `python ARGV` until it ends. SystemExit goes to the top, so that Python ends as it does after a script."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    argv = request["argv"]
    if argv[0] == "-m":
        sys.argv[:] = [argv[1], *argv[2:]]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(argv)
    sys.exit()


def _run_script(argv: list[str]) -> None:
    """As Python does it. The observer is installed first: its own start waits for the import of torch."""
    from testbed.attach import observer

    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    observer.install()
    main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = main
    exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__)


if __name__ == "__main__":
    serve()
