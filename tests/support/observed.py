"""Runs a script of tests/scripts in real ranks with the observer inside, without the controller."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import testbed
from testbed.attach import channel
from testbed.attach.intake import Intake, Records
from testbed.control.machine import affinity
from testbed.results.observations import Call, Calls, Unseen
from testbed.results.records import Record, read
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.script import SWAP_STEP
from tests.support.forked import ForkedProcess, fork

SCRIPTS = Path(__file__).parents[1] / "scripts"
TIMEOUT_S = 180.0


class Rank(NamedTuple):
    """How one rank of a script ended, and what was recorded about it."""

    code: int
    output: str
    records: list[Record]

    def of(self, kind: type[Any]) -> list[Any]:
        """The records of one kind."""
        return [each for each in self.records if isinstance(each, kind)]

    @property
    def rows(self) -> list[Call]:
        """The collectives of all steps."""
        return list(self.of(Calls)[-1].rows)

    @property
    def unseen(self) -> list[str]:
        return [each.seam for each in self.of(Unseen)]


def python_path(folder: Path) -> Path:
    """A folder with `testbed` and the observer's sitecustomize, as the launcher makes it."""
    made = folder / "python"
    if not made.exists():
        package = Path(testbed.__file__).parent
        made.mkdir()
        (made / "testbed").symlink_to(package)
        shutil.copy(package / "attach" / "inject" / "sitecustomize.py", made)
    return made


def run_ranks(
    folder: Path,
    script: str,
    *,
    ranks: int = 2,
    attached: bool = True,
    listening: bool = True,
    variables: Mapping[str, str] | None = None,
    of_rank: Mapping[int, Mapping[str, str]] | None = None,
    request: Mapping[str, Any] | None = None,
    records: str = "",
    started: bool = False,
    cores: Sequence[int] = (),
) -> list[Rank]:
    """Run the ranks of a script to their end. `records`: where the lines go instead of files in the folder.

    `variables`: of all ranks; `of_rank`: further ones of single ranks.
    `started`: each rank is a Python that is started as the launcher does it, not one that is forked; `cores`: that of
    each started rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = Path(tempfile.mkdtemp(dir=folder))
    common = {"PATH": os.environ["PATH"], "HOME": str(place), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONHASHSEED": "0"}
    intakes, paths = [], []
    processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
    for rank in range(ranks):
        own = common | {"RANK": str(rank), "LOCAL_RANK": "0"}
        paths.append(Path(records) if records else place / f"rank{rank}.jsonl")
        if attached:
            path = place / f"observer{rank}"
            asked = {"schema": SCHEMA, "interface": "lo", "deadline": 60.0, **(request or {})}
            own |= {channel.VARIABLE: str(path), channel.REQUEST: json.dumps(asked)}
            own["PYTHONPATH"] = str(python_path(folder))
            if listening:
                written = Records(paths[-1])
                intakes.append((Intake(path, written, os.geteuid()), written))
        log, environment = place / f"{rank}.log", own | dict(variables or {}) | dict((of_rank or {}).get(rank, {}))
        argv = [str(SCRIPTS / script)]
        with affinity.limited_to(cores[rank : rank + 1] or None):
            processes.append(_start(argv, environment, log) if started else fork(argv, environment, SCRIPTS, log))
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for intake, written in intakes:
            intake.finish(TIMEOUT_S)
            with contextlib.suppress(OSError):  # a full disk
                written.close()
    logs = [(place / f"{rank}.log").read_text() for rank in range(ranks)]
    return [Rank(*each) for each in zip(codes, logs, [_read(path) for path in paths], strict=True)]


def _start(argv: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        argv = [sys.executable, *argv]
        return subprocess.Popen(argv, env=environment, cwd=SCRIPTS, stdout=out, stderr=subprocess.STDOUT)


def instead(mode: str, ranks: int = 2) -> dict[str, Any]:
    """What the launcher asks of the observer for `--instead MODE`."""
    script = {"argv": ["python", "main.py"], "folder": "/"}
    spec = RunSpec.load({"mode": mode, "nodes": ranks, "batch_per_rank": 1, "script": script}, where="")
    asked = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"instead": asked | {"mode": mode}, "swap": SWAP_STEP}


def _read(path: Path) -> list[Record]:
    return list(read(path)) if path.is_file() else []
