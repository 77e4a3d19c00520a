"""Start the user's script on one node, receive what the observer sees, and record how it ended.

    python -m testbed.attach.launch --folder RUN       on every node; RANK, MASTER_ADDR, ... are in the environment

The script is untrusted code. It runs in a copy of its folder (workplace.py), as an ordinary user without privileges
(sandbox.py), with few environment variables. The launcher writes rankN.jsonl: the lines that the observer sends
(intake.py), then a record `end` or `error` with bytes and times that the launcher has measured. The log of the
script's output has a size limit, and its last lines are kept. If the script fails, the error message is taken from
them. When the script's first process ends, or the launcher gets SIGTERM, the launcher ends every process that the
script has started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from testbed.attach import channel, rewrite, sandbox
from testbed.attach.intake import Intake, Records
from testbed.attach.workplace import Workplace, offer
from testbed.rank.counters import Counter, NoCounter, open_counter
from testbed.rank.watchdog import install_oom_handler
from testbed.results.folder import RunFolder
from testbed.results.observations import Unseen
from testbed.results.receipt import RATE_VARIABLE
from testbed.results.records import End, Error
from testbed.spec.datasets import data_dir
from testbed.spec.errors import PeerLost, RankFailed, TestbedError, UsageError, one_line
from testbed.spec.own_files import METHODS_VARIABLE
from testbed.spec.privileges import NOBODY, alone_as, is_root
from testbed.spec.process_tree import become_subreaper, end_descendants
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.script import SCRIPT_DEADLINE_S, SWAP_STEP, ScriptSpec, fill
from testbed.spec.units import approximate_size

OWNER_VARIABLE = "TESTBED_OWNER"  # marks every process of a run, so that it can be found and ended
LAUNCHER_VARIABLE = "TESTBED_LAUNCHER"  # pid of the launcher, in every process of its script
FOLDER_VARIABLE = "TESTBED_SCRIPT"  # the script's folder on this node, if its path differs from that in the spec
USER_VARIABLE = "TESTBED_SCRIPT_USER"  # "uid:gid" of the script, if this launcher may start it as another user
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "TERM", OWNER_VARIABLE)
STOP_GRACE_S = 2.0  # between SIGTERM and SIGKILL; the controller waits 5 s for the launcher
EXIT_GRACE_S = 20.0  # for the script to end after the last requested step
ASK_SHARE = 0.5  # of the deadline without a step, after which the script is asked where it is
READ_TIMEOUT_S = 5.0  # for the last lines and the last output of processes that have ended
STOPPED_CODE = 128 + signal.SIGTERM


class Stopped(BaseException):
    """The launcher got SIGTERM, because the controller stops the run or has ended."""


def _stop(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def script_user(variables: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the uid and gid of the script: this user's; for root those of the caller of sudo, else of nobody."""
    own, _, group = variables.get(USER_VARIABLE, "").partition(":")
    if own.isdecimal() and group.isdecimal() and int(own):
        return int(own), int(group)
    if not is_root():
        return os.geteuid(), os.getegid()
    uid, gid = variables.get("SUDO_UID", ""), variables.get("SUDO_GID", "")
    return (int(uid), int(gid)) if uid.isdecimal() and gid.isdecimal() and int(uid) else (NOBODY, NOBODY)


def environment(
    spec: RunSpec, place: Workplace, inherited: Mapping[str, str], offered: Mapping[str, Any]
) -> dict[str, str]:
    """Return the script's environment variables; few are the caller's. `offered`: data sets, for vision.py."""
    assert spec.script is not None
    kept = (*KEPT_VARIABLES, *spec.script.handed, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: inherited[name] for name in kept if name in inherited} | spec.script.environment
    interface = inherited.get("GLOO_SOCKET_IFNAME", "lo")
    deadline = spec.deadline or SCRIPT_DEADLINE_S
    request: dict[str, Any] = {"schema": SCHEMA, "steps": spec.steps, "interface": interface, "deadline": deadline}
    hard_coded = (spec.script.address, spec.script.interface)
    request |= {"data": offered, "rewrite": rewrite.request(*hard_coded, own["MASTER_ADDR"], interface)}
    request["as_cpu"] = spec.script.as_cpu
    if not spec.mode.is_script:  # --instead: the mode replaces the script's synchronisation (instead.py)
        asked = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        rate = float(inherited.get(RATE_VARIABLE, 0)) or None
        request |= {"instead": asked | {"mode": str(spec.mode)}, "swap": SWAP_STEP, "rate": rate}
    path = os.pathsep.join(filter(None, (str(place.python), own.get("PYTHONPATH"))))
    defaults = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": str(spec.threads), "PYTHONUNBUFFERED": "1"}
    base = user_base()
    return (
        defaults
        | ({"PYTHONUSERBASE": str(base)} if base else {})
        | own
        | like_torchrun(inherited)
        | {
            "PATH": spec.script.path or inherited.get("PATH", os.defpath),
            "HOME": str(place.home),
            "TMPDIR": str(place.home),
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            LAUNCHER_VARIABLE: str(os.getpid()),
            **({METHODS_VARIABLE: str(place.methods)} if place.methods.is_dir() else {}),
            channel.VARIABLE: str(place.socket),
            channel.REQUEST: json.dumps(request),
        }
    )


def like_torchrun(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun sets, for one process a node, so that frameworks join the process group.

    Lightning reads the number of its node from them, and compares its own number of nodes with WORLD_SIZE.
    """
    rank, world = inherited["RANK"], inherited["WORLD_SIZE"]
    return {
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world},
        **{"GROUP_RANK": rank, "GROUP_WORLD_SIZE": world, "NODE_RANK": rank},
        **{"TORCHELASTIC_RUN_ID": "testbed", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
    }


def user_base() -> Path | None:
    """Return the folder of the packages that the caller installed by `pip install --user`; None if there is none."""
    with contextlib.suppress(KeyError, RuntimeError):
        outside = alone_as() if os.geteuid() == 0 else None
        uid = script_user()[0] if outside is None else outside
        base = Path(pwd.getpwuid(0 if uid == NOBODY and is_root() else uid).pw_dir) / ".local"
        return base if (base / "lib").is_dir() else None
    return None


def placeholders(place: Workplace, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the placeholders in the command line, e.g. {rank}, on this node."""
    return {
        "rank": variables["RANK"],
        "world": variables["WORLD_SIZE"],
        "master": variables["MASTER_ADDR"],
        "port": variables["MASTER_PORT"],
        "address": variables.get("TESTBED_ADDRESS", "127.0.0.1"),
        "interface": variables.get("GLOO_SOCKET_IFNAME", "lo"),
        "attach": str(place.python / "testbed" / "attach" / "__main__.py"),
    }


class Script:
    """The script's processes, from their start to the end of the last one."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        place: Workplace,
        output: Output,
        files: Sequence[int] = (),  # open files that the script inherits
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(variables),
            cwd=place.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=files,
        )
        assert self._process.stdout is not None
        self._copier = threading.Thread(target=output.copy, args=(self._process.stdout.fileno(),), daemon=True)
        self._copier.start()
        self.ended = 0.0  # monotonic time at which the first process ended

    def wait(self) -> int:
        """Wait until the first process has ended, and end all others. Return its code: negative for a signal."""
        code = self._process.wait()
        self.ended = time.monotonic()
        self.end()
        return code if code <= sandbox.SIGNAL_BASE else sandbox.SIGNAL_BASE - code

    def end(self, grace_s: float = 0.0) -> None:
        """End every process of the script, also those in sessions of their own."""
        end_descendants(os.getpid(), grace_s)
        self._process.wait()
        # Orphans of the script are children of this process now. Until this process waits for them, they count towards
        # the container's limit of processes, and no other command could start there.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self._copier.join(READ_TIMEOUT_S)


def run_script(spec: RunSpec, folder: RunFolder, rank: int) -> int:
    """Run the script to its end and return the exit code of the launcher. Raise TestbedError if it cannot start."""
    assert spec.script is not None
    become_subreaper()
    user = script_user()
    records = Records(folder.records(rank))
    source = Path(os.environ.get(FOLDER_VARIABLE) or spec.script.folder)
    try:
        with Workplace(source, user, spec.script.exclude, os.environ.get(OWNER_VARIABLE, "")) as place:
            return _run_in(place, spec, folder, rank, records)
    except TestbedError as error:
        records.write(Error(code=error.exit_code, message=str(error), at=time.monotonic()))
        raise
    except Stopped:
        records.write(Error(code=STOPPED_CODE, message="stopped", at=time.monotonic()))
        return STOPPED_CODE


def _run_in(place: Workplace, spec: RunSpec, folder: RunFolder, rank: int, records: Records) -> int:
    assert spec.script is not None
    if method := folder.own_file(spec, "mode"):
        place.put_method(method)
    offered = offer_data(place, spec.script)
    variables = environment(spec, place, os.environ, offered)
    argv = fill(in_working_copy(spec.script), placeholders(place, os.environ))
    output = Output(sys.stdout.buffer, spec.script.output)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    # On loopback a process counts its own sockets only, and those of the script belong to another process.
    counter: Counter = open_counter(interface) if interface != "lo" else NoCounter()
    intake = Intake(place.socket, records, place.owner[0])
    place.hand_over()
    begun, before = time.monotonic(), counter.read()
    script = start(argv, variables, place, output, [Path(each["root"]) for each in offered.values()])
    threading.Thread(target=ask_while_silent, args=(spec, records, intake), daemon=True).start()
    late = threading.Timer(EXIT_GRACE_S, end_descendants, args=(os.getpid(),))
    late.daemon = True
    records.on_limit = late.start
    try:
        code = script.wait()
    except Stopped:
        script.end(STOP_GRACE_S)
        raise
    finally:
        intake.finish(READ_TIMEOUT_S)
        output.finish()
        late.cancel()
        moved = [_difference(a, b) for a, b in zip(before, counter.read(), strict=True)]
        if records.dropped:
            what = f"{records.dropped} lines were dropped, because they are no records of this version"
            records.write(Unseen(seam="records", error=what))
        records.write(place.collect(folder.files(rank)))
    if not spec.mode.is_script and not records.swapped and not records.refused and records.steps and code == 0:
        error = Error(code=UsageError.exit_code, message=too_short(spec, records.steps), at=script.ended)
        records.write(error)
        return error.code
    if (code == 0 or records.reached_limit) and records.steps:
        seconds = script.ended - begun
        end = End(steps=records.steps, seconds=seconds, sent=moved[0], received=moved[1], processes=records.processes)
        records.write(end)
        return 0
    error = failure(spec.script, variables, code, output.tail, script.ended)
    if code == UsageError.exit_code and records.refused:
        error = Error(code=code, message=records.refused, at=script.ended, script_code=code)
    records.write(error)
    return error.code


def too_short(spec: RunSpec, steps: int) -> str:
    """Return the message on a script that ended before a mode could replace its synchronisation."""
    rule = f"the script made {steps} steps, and the mode synchronises from step {SWAP_STEP + 1} on"
    return f"--instead {spec.mode}: {rule} and is timed from step {spec.warmup + 1} on. Let the script make more steps."


def ask_while_silent(spec: RunSpec, records: Records, intake: Intake) -> None:
    """Ask a script that makes no step which line it executes, before the controller ends it at its deadline."""
    deadline = spec.deadline or SCRIPT_DEADLINE_S
    asked_at = 0.0
    while True:
        time.sleep(min(5.0, ASK_SHARE * deadline / 2))
        limit = ASK_SHARE * (deadline if records.steps else max(deadline, spec.start_deadline))
        if asked_at < records.last_step < time.monotonic() - limit:
            asked_at = records.last_step
            intake.ask()


def offer_data(place: Workplace, script: ScriptSpec) -> dict[str, Any]:
    """Link the data sets of this machine at the places where the script looks for them. Return what was linked."""
    scratch = place.root / "layouts"
    scratch.mkdir()
    try:
        return offer(data_dir(), place.work, script.data_at, scratch)
    except (OSError, TestbedError) as error:
        print(f"testbed: the script finds no data set of this machine ({one_line(str(error))})", file=sys.stderr)
        return {}


def in_working_copy(script: ScriptSpec) -> list[str]:
    """Return the command line. The path of a script inside the user's folder becomes relative to the working copy."""
    file = Path(script.program)
    if script.program and file.is_absolute() and file.is_relative_to(script.folder):
        return [str(file.relative_to(script.folder)) if word == script.program else word for word in script.argv]
    return list(script.argv)


def start(
    argv: Sequence[str], variables: Mapping[str, str], place: Workplace, output: Output, more: Sequence[Path]
) -> Script:
    """Start the script in its sandbox. Raises UsageError if its command does not exist."""
    if shutil.which(argv[0], path=variables["PATH"]) is None and not (place.work / argv[0]).is_file():
        raise UsageError(f"command {one_line(argv[0])!r}: not found on this node. Its PATH is {variables['PATH']}")
    needs = [*sandbox.interpreter_paths(argv[0], variables["PATH"]), Path(sys.prefix), Path(sys.base_prefix)]
    needs += more
    needs += [Path(word).parent for word in argv if word.endswith(".py") and Path(word).is_absolute()]
    if "PYTHONUSERBASE" in variables:
        needs.append(Path(variables["PYTHONUSERBASE"]))
    handle = sandbox.open_variables(variables)
    try:
        command = sandbox.command(script_user(), needs, place.root, argv, handle)
        if is_root():  # unshare and the sandbox run as root, so the script's variables must not affect them
            first = {name: variables[name] for name in (OWNER_VARIABLE, LAUNCHER_VARIABLE) if name in variables}
            return Script(command, first | {"PATH": os.environ.get("PATH", os.defpath)}, place, output, [handle])
        return Script(command, variables, place, output)
    finally:
        os.close(handle)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def failure(script: ScriptSpec, variables: Mapping[str, str], code: int, tail: str, at: float) -> Error:
    """Return the error record of a script that failed, with its exit code and the line of its output that says why."""
    words = last_words(tail)
    if code == 0:
        rule = "no step of an optimizer of torch.optim was seen"
        words = f"{rule}{f'; its last line is: {words}' if words else ''}"
    elif "No module named 'torch'" in words:
        python = shutil.which(script.argv[0], path=variables["PATH"]) or script.argv[0]
        way_out = "Activate the environment that has it, or write its path: testbed exec -- /path/to/python main.py"
        words = f"{words}: the interpreter {python} has no torch. {way_out}"
    lost = code != 0 and lost_another(words)
    kind = PeerLost if lost else RankFailed
    return Error(code=kind.exit_code, message=words, at=at, script_code=code)


def main() -> int:
    """Read the spec and run the script. Return the exit code. Raise UsageError if the spec has no script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="start the script again from its beginning")
    options = parser.parse_args()
    folder = RunFolder(options.folder)
    rank = int(os.environ["RANK"])
    os.environ[METHODS_VARIABLE] = str(folder.methods)  # else the user's own mode in the spec would be unknown
    spec = folder.read_spec()
    if spec.script is None:
        raise UsageError(f"{folder.spec}: has no script. Use `testbed exec`.")
    signal.signal(signal.SIGTERM, _stop)
    install_oom_handler(spec)  # the fault `oom` limits the memory of the whole node, so the launcher may exceed it
    if options.resume:
        folder.set_records_aside(rank)
    try:
        return run_script(spec, folder, rank)
    except (TestbedError, OSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, TestbedError) else 1
    except Stopped:
        return STOPPED_CODE


CHUNK_BYTES = 1 << 16
TAIL_BYTES = 64 << 10  # the end of the output, which is kept even if the log is full
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch begins each line of an exception with the rank
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")  # without ^: half a line may come before it
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(:.*)?$")
_WRAPPERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
# Messages of torch and Gloo on a rank when another rank has ended or cannot be reached.
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted|was closed|was reset)|broken pipe|closed by peer|reset by peer"
    r"|connectfullmesh|dist(network|store|backend)error|failed to (recv|send|connect)|timed out|timeout"
    r"|no route to host|unreachable|recvbytes|sendbytes|rendezvous(closed|connection|timeout)",
    re.IGNORECASE,
)


class Output:
    """Copies the output of the script to a log of at most `limit` bytes. The last TAIL_BYTES are always kept."""

    def __init__(self, target: BinaryIO, limit: int) -> None:
        self._target, self._left, self._limit = target, limit, limit
        self._tail = bytearray()
        self.total = 0  # bytes that the script has printed

    def copy(self, source: int) -> None:
        """Copy a pipe until it ends. If the log cannot be written, e.g. on a full disk, go on reading the pipe."""
        while chunk := os.read(source, CHUNK_BYTES):
            self.add(chunk)

    def add(self, chunk: bytes) -> None:
        """Add the next bytes of the output to the log."""
        self.total += len(chunk)
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        if self._left > 0:
            self._write(chunk[: self._left])
            self._left -= len(chunk)

    def finish(self) -> None:
        """If the output exceeded the limit, write to the log how much is missing, and the end of the output."""
        missing = self.total - self._limit
        if missing > 0:
            end = bytes(self._tail[-min(missing, TAIL_BYTES) :])
            left_out = missing - len(end)
            rule = f"{approximate_size(self.total)} of output, and a log has at most {approximate_size(self._limit)}"
            self._write(f"\ntestbed: {rule}; {approximate_size(left_out)} are left out here\n".encode() + end)

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._target.write(content)
            self._target.flush()

    @property
    def tail(self) -> str:
        return bytes(self._tail).decode(errors="replace")


def last_words(text: str) -> str:
    """Return the line that says why a script ended: its last exception, else its last line; empty without output."""
    found = [line for line in exceptions(text) if not line.split(":")[0].endswith(_WRAPPERS)]
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]
    return one_line(found[-1] if found else lines[-1] if lines else "")


def exceptions(text: str) -> list[str]:
    """Return the last line of every traceback, which has the exception, in order."""
    found, inside = [], False
    for line in (_PREFIX.sub("", each) for each in text.splitlines()):
        if _TRACEBACK.search(line):
            inside = True
        elif inside and _EXCEPTION.match(line):
            found.append(line)
            inside = False
    return found


def lost_another(text: str) -> bool:
    """Return True if the text has a message of a rank that lost or did not reach another rank."""
    return bool(_LOST.search(text))


if __name__ == "__main__":
    sys.exit(main())
