"""Start the user's script on one node, receive what the observer sees, and record how it ended.

    python -m testbed.attach.launch --folder RUN       on every node; RANK, MASTER_ADDR, ... are in the environment

The script is foreign code. It runs in a copy of its folder, as an ordinary user without privileges, with few
variables. The launcher writes rankN.jsonl: the lines that the observer sends through a Unix socket, then `end` or
`error`, whose bytes and times are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import testbed
from testbed.attach import channel, sandbox
from testbed.attach.offers import offer
from testbed.rank.counters import open_counter
from testbed.results.folder import RunFolder
from testbed.results.records import MAX_LINE_BYTES, End, Error, encode
from testbed.spec.datasets import data_dir
from testbed.spec.errors import RankFailed, TestbedError, UsageError, one_line
from testbed.spec.privileges import NOBODY
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.script import NOT_COPIED, ScriptSpec, fill

OWNER_VARIABLE = "TESTBED_OWNER"  # marks every process of a run, so that it can be found and ended
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "TERM", OWNER_VARIABLE)
KINDS = {"start", "step", "setup", "calls", "gradients", "parameters", "batch", "pass", "unseen", "hash"}
SCRIPT_DEADLINE_S = 300.0  # without a step, after which a script is taken to hang
STOP_GRACE_S = 3.0  # between SIGTERM and SIGKILL
ACCEPT_BACKLOG = 64
TAIL_LINES = 3  # of the script's output, quoted in the message on its failure


class Records:
    """Writes rankN.jsonl. The first process that sends `start` is the rank; lines of others are dropped."""

    def __init__(self, path: Path, limit_bytes: int = 128 << 20) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._left = limit_bytes
        self._rank: int | None = None  # the connection that sent `start`
        self.steps = 0
        self.reached_limit = False

    def accept(self, connection: int, line: bytes) -> None:
        """Take one line of the observer; what is no record is dropped."""
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if not isinstance(record, dict):
                return
            kind = record.get("kind")
            with self._lock:
                if kind == "start" and self._rank is None:
                    self._rank = connection
                if kind == "limit":
                    self.reached_limit = True
                if kind not in KINDS or self._rank not in (None, connection) or len(line) > self._left:
                    return
                self._left -= len(line)
                self.steps += kind == "step"
                self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def write(self, record: End | Error) -> None:
        with self._lock:
            self._file.write(encode(record) + "\n")


def listen(path: Path, records: Records) -> socket.socket:
    """Listen for observers in threads that end with this process."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    path.chmod(0o666)  # the folder around it belongs to the script's user alone
    server.listen(ACCEPT_BACKLOG)

    def read(connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                if line.endswith(b"\n"):
                    records.accept(number, line)

    def serve() -> None:
        number = 0
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=read, args=(connection, number), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return server


class Workplace:
    """The folders of one script on one node: a copy of its own, and the Python path with the observer."""

    def __init__(self, script: ScriptSpec, owner: tuple[int, int]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="testbed-script-"))
        self.root.chmod(0o711)
        self.work, self.python = self.root / "work", self.root / "python"
        self.home = self.root / "home"
        self.offered: dict[str, Any] = {}  # data sets, for attach/vision.py
        shutil.copytree(
            os.environ.get("TESTBED_SCRIPT") or script.folder,
            self.work,
            symlinks=True,
            ignore=shutil.ignore_patterns(*NOT_COPIED),
            dirs_exist_ok=True,
        )
        self.home.mkdir()
        package = Path(testbed.__file__).parent
        shutil.copytree(package, self.python / "testbed", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(package / "attach" / "inject" / "sitecustomize.py", self.python / "sitecustomize.py")
        self.socket = self.home / "observer"
        if os.geteuid() == 0:
            for path in (self.work, self.home, *self.work.rglob("*")):
                os.chown(path, *owner, follow_symlinks=False)

    def offer_data(self, script: ScriptSpec, owner: tuple[int, int]) -> None:
        """Link the data sets of this machine where the script looks for them."""
        scratch = self.root / "layouts"
        scratch.mkdir()
        try:
            self.offered = offer(data_dir(), self.work, script.data_at, scratch, owner)
        except (OSError, TestbedError) as error:
            print(f"testbed: no data set is offered to the script ({one_line(str(error))})", file=sys.stderr)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def script_user() -> tuple[int, int]:
    """The user that the script runs as: the one who called sudo, else this one, else nobody instead of root."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    caller = os.environ.get("TESTBED_CALLER", "")
    uid, _, gid = caller.partition(":")
    return (int(uid), int(gid)) if uid.isdecimal() and gid.isdecimal() and int(uid) else (NOBODY, NOBODY)


def environment(spec: RunSpec, place: Workplace, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of the script: a list, not the caller's environment."""
    assert spec.script is not None
    own = {name: inherited[name] for name in KEPT_VARIABLES if name in inherited}
    own |= {name: inherited[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    interface = inherited.get("GLOO_SOCKET_IFNAME", "lo")
    deadline = spec.deadline or SCRIPT_DEADLINE_S
    request: dict[str, Any] = {"schema": SCHEMA, "steps": spec.steps, "interface": interface, "deadline": deadline}
    request |= {"data": place.offered}
    return own | {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "PATH": spec.script.path or inherited.get("PATH", os.defpath),
        "HOME": str(place.home),
        "TMPDIR": str(place.home),
        "OMP_NUM_THREADS": str(spec.threads),
        "PYTHONPATH": str(place.python),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        channel.VARIABLE: str(place.socket),
        channel.REQUEST: json.dumps(request),
        **spec.script.environment,
    }


def copy_output(source: IO[bytes], limit: int, tail: list[str]) -> None:
    """Copy the script's output to ours, up to `limit` bytes, and keep its last lines."""
    target, left = sys.stdout.buffer, limit
    for line in iter(lambda: source.readline(1 << 16), b""):
        text = one_line(line.decode(errors="replace").strip())
        if text:
            tail.append(text)
            del tail[:-TAIL_LINES]
        if left > 0:
            target.write(line[:left])
            target.flush()
            left -= len(line)
            if left <= 0:
                target.write(f"\ntestbed: more than {limit} bytes of output; the rest is dropped\n".encode())
                target.flush()


def run_script(spec: RunSpec, folder: RunFolder, rank: int, argv: Sequence[str]) -> int:
    """Run the script to its end; return the exit code of the launcher."""
    assert spec.script is not None
    user = script_user()
    place = Workplace(spec.script, user)
    place.offer_data(spec.script, user)
    records = Records(folder.records(rank))
    counter = open_counter(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    tail: list[str] = []
    begun, before = time.monotonic(), counter.read()
    try:
        server = listen(place.socket, records)
        variables = environment(spec, place, os.environ)
        command = list(argv)
        if os.geteuid() == 0:
            needs = [*sandbox.interpreter_paths(argv[0], variables["PATH"]), Path(sys.prefix), Path(sys.base_prefix)]
            needs += [Path(each["root"]) for each in place.offered.values()]
            command = sandbox.command(*user, needs, argv)
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=place.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        assert process.stdout is not None
        copy_output(process.stdout, spec.script.output, tail)
        code = process.wait()
        server.close()
        time.sleep(0.05)  # for the last lines of the observer
    finally:
        place.remove()
    sent, received = (_difference(a, b) for a, b in zip(before, counter.read(), strict=True))
    if code == 0 and records.steps:
        seconds = time.monotonic() - begun
        records.write(End(steps=records.steps, seconds=seconds, sent=sent, received=received))
        return 0
    records.write(Error(code=RankFailed.exit_code, message=_why(argv, code, records.steps, tail), at=time.monotonic()))
    return RankFailed.exit_code


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _why(argv: Sequence[str], code: int, steps: int, tail: Sequence[str]) -> str:
    name = next((word for word in argv if word.endswith(".py")), argv[0])
    if code == 0:
        rule = "no step of an optimizer was seen"
        return f"{name} ended with code 0 before its first step: {rule}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{name} {how}" + (f": {tail[-1]}" if tail else "")


def main() -> int:
    """Read the request and run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    folder = RunFolder(parser.parse_args().folder)
    rank = int(os.environ["RANK"])
    spec = folder.read_spec()
    if spec.script is None:
        raise UsageError(f"{folder.spec}: has no script. Use `testbed exec`.")
    values: dict[str, Any] = {
        "rank": str(rank),
        "world": os.environ["WORLD_SIZE"],
        "master": os.environ["MASTER_ADDR"],
        "port": os.environ["MASTER_PORT"],
        "address": os.environ.get("TESTBED_ADDRESS", "127.0.0.1"),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    try:
        return run_script(spec, folder, rank, fill(spec.script.argv, values))
    except (TestbedError, OSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, TestbedError) else 1


if __name__ == "__main__":
    sys.exit(main())
