"""Nodes in a kernel of our own: user-mode Linux, a kernel that is an ordinary program of an ordinary user.

    this machine:    controller -- UmlSubstrate                            run folder
                           | a pair of pipes, one JSON object per line         |
    linux.uml:       /dev/ttyS0 -- agent (`main`, root in that kernel) -- NetnsSubstrate -- ranks

So a user whose kernel has no netem, or who may not make namespaces, gets a network with rate, delay and loss. The agent
has a NetnsSubstrate and executes what the controller asks of it; everything else about a run is as on netns. Ranks are
the same programs: the file system of this machine is the root of that kernel, read-only but for the run folder
(hostfs). The kernel has the rights of the user who started it and no other, so root is refused.

It has one processor. Computing takes its usual time, system calls several times longer, and the ranks take turns. So
`check` and `check_model` refuse what would measure that processor instead of the network.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import tty
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from testbed.control.machine import ownership
from testbed.control.machine.processes import kill_until_gone, pids_of_session
from testbed.control.machine.user_namespace import first_hidden, run_folders
from testbed.control.substrates.base import NodeCounts, NodeHandle, NodePlan, Process
from testbed.control.substrates.process import dies_with_parent, package_path
from testbed.net.shaping import Shaping
from testbed.spec.errors import (
    NetworkInvalid,
    RankFailed,
    SpecError,
    TestbedError,
    Unavailable,
    one_line,
    require_extra,
)
from testbed.spec.models import MAX_PARAMETERS_VARIABLE, model_info
from testbed.spec.run import DEFAULT_PORT, RunSpec

MAX_NODES = 8
MAX_PARAMETERS = 1_000_000  # the gradients of one step are 4 MB
BYTES_OF_KERNEL, BYTES_PER_NODE = 1 << 30, 400 << 20  # of memory; what is not used is not taken
SHARED_MEMORY = Path("/dev/shm")
PACKAGE = "user-mode-linux"  # of Debian and its derivatives
MODULES = ("bridge", "veth", "ifb", "sch_tbf", "sch_netem", "sch_ingress", "cls_u32", "act_mirred")
HIDDEN = (Path("/run"), Path("/dev"), Path("/proc"), Path("/sys"))  # folders that are that kernel's own
BOOT_TIMEOUT_S = 120.0  # the kernel alone took 3 s on a busy machine
CALL_TIMEOUT_S = 180.0  # of one request to the agent; at a load of 60 making the nodes took more than 60 s
MAX_CONSOLE_BYTES = 1 << 20
POLL_S = 0.05  # of the agent, for ranks that have ended
END_TIMEOUT_S = 5.0  # of the keeper, which kills the kernel
KILLED_TIMEOUT_S = 30.0  # of a killed keeper; on a busy machine the kernel's memory takes seconds to be freed

PLANS, NODES = TypeAdapter(list[NodePlan]), TypeAdapter(list[NodeHandle])
RESULTS: dict[str, TypeAdapter[Any]] = {  # of requests that return something
    "shaping": TypeAdapter(Shaping),
    "uplinks": TypeAdapter(dict[int, Shaping]),
    "counts": TypeAdapter(NodeCounts),
}
REFUSALS = {kind.__name__: kind for kind in (Unavailable, SpecError, NetworkInvalid)}  # errors that keep their kind
# A shell that starts the kernel, which makes a process group of its own. When the kernel ends, or this controller does,
# the shell kills that group, because a kernel that is killed leaves the processes that held its memory. SIGTERM may
# come while it cleans up: the kernel also ends by itself, when the controller's end of its line is closed. So SIGTERM
# is ignored before the clean-up begins: an `exit` of its trap inside of that of EXIT would end the clean-up.
KEEPER = """
trap 'trap "" TERM; exit 1' TERM
trap 'kill -KILL -$! $! 2>/dev/null; rm -rf -- "$0"' EXIT
"$@" & wait $!
trap '' TERM
"""
# What is mounted before the agent starts. Its folder of temporary files is in memory.
BOOT = """#!/bin/sh
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/netns /run/tmp /dev/shm && mount -t tmpfs tmpfs /dev/shm
ln -s /proc/self/fd /dev/fd
cd {folder} && {agent}
"""


# On this machine


def cache_folder() -> Path:
    """Return where `make uml` unpacks the package for this user, who cannot install it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "testbed" / "uml"


def find_kernel() -> tuple[Path, Path]:
    """Return the kernel and the folder of its modules. Raises Unavailable."""
    installed = shutil.which("linux.uml")
    for program in (cache_folder() / "usr/bin/linux.uml", *([Path(installed)] if installed else [])):
        modules = [each.parent for each in (program.parent.parent / "lib/uml/modules").glob("*/modules.dep")]
        if os.access(program, os.X_OK) and modules:
            return program, max(modules, key=lambda each: [int(part) for part in re.findall(r"\d+", each.name)])
    way_out = f"Install the package {PACKAGE}, or unpack it for yourself: make uml"
    raise Unavailable(f"substrate uml: there is no user-mode Linux (linux.uml) here. {way_out}")


def check(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable for what a kernel of our own cannot do. What it lacks itself it says when it has booted."""
    require_extra("substrate uml", "rank", "torch", "torchvision")
    if os.geteuid() == 0:
        rule = "never runs as root, because a kernel of root's could write every file of this machine"
        raise Unavailable(f"substrate uml: {rule}. Start testbed as an ordinary user, e.g. sudo -u USER testbed ...")
    find_kernel()
    if len(plans) > MAX_NODES:
        rule = f"{len(plans)} nodes would take turns on its one processor; {MAX_NODES} can"
        raise Unavailable(f"substrate uml: {rule}. Use --nodes {MAX_NODES} or fewer, or --on netns or compose")
    shares = sum(plan.cpus or 0.0 for plan in plans)
    if shares > 1:
        rule = f"it has one processor, and the nodes have {shares:g} CPUs together"
        raise Unavailable(f"substrate uml: {rule}. Use e.g. --set node.cpus={0.9 / len(plans):.1g}")
    check_visible(*run_folders(), Path(tempfile.gettempdir()))


def check_visible(*folders: Path) -> None:
    """Raise Unavailable if the kernel would hide one of these folders from the ranks."""
    hidden = first_hidden(folders, HIDDEN)
    if hidden is not None:
        rule = "is in a folder that a user-mode kernel has of its own"
        raise Unavailable(f"substrate uml: {hidden} {rule}. Use another folder than {', '.join(map(str, HIDDEN))}")


def check_model(spec: RunSpec) -> None:
    """Raise Unavailable for a model whose steps would measure the processor, and for a user's script.

    The size of a user's model is known only to the ranks: they refuse it by the variable that `start` sets.
    """
    if spec.script is not None:
        rule = "runs testbed's own training, not scripts: their system calls would be most of what is measured"
        raise Unavailable(f"substrate uml: {rule}. Use --on netns or compose")
    count = model_info(spec.model).parameters
    if count > MAX_PARAMETERS:
        rule = f"{spec.model} has {count} parameters, and with more than {MAX_PARAMETERS} the one processor is measured"
        raise Unavailable(f"substrate uml: {rule}, not the network. Use --model lenet5, or --on netns or compose")


class Kernel:
    """A user-mode kernel with the agent in it; leaving the context ends it with all of its processes."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._cleanup = ExitStack()
        self._answers: dict[int, dict[str, Any]] = {}
        self._codes: dict[int, int] = {}  # of processes that have ended, by the agent's number
        self._changed = threading.Condition()
        self._gone = False
        self._count = 0
        self._ready = False

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix=ownership.owned_name("uml-"))))
            self._console = undo.enter_context((folder / "console").open("w+b"))
            process, answers = self._boot(folder, undo)
            undo.callback(_end, process)
            threading.Thread(target=self._read, args=(answers,), daemon=True).start()
            self._wait(lambda: self._ready, BOOT_TIMEOUT_S, "start")
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _boot(self, folder: Path, undo: ExitStack) -> tuple[subprocess.Popen[bytes], int]:
        program, modules = find_kernel()
        init = folder / "init"
        agent = [sys.executable, "-P", "-m", "testbed.control.substrates.uml", "/dev/ttyS0", str(modules)]
        own = {"PYTHONPATH": package_path(), "TMPDIR": "/run/tmp", "HOME": "/run/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
        own["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        init.write_text(boot_script(os.environ | own, Path.cwd(), agent))
        init.chmod(0o700)
        theirs, self._requests = os.pipe()
        answers, theirs_too = os.pipe()
        undo.callback(os.close, self._requests)
        kernel = [str(program), "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"mem={self._memory_bytes}"]
        quiet = ["quiet", "loglevel=3", "con=null", "con0=null,fd:1", "ssl=null", f"ssl0=fd:{theirs},fd:{theirs_too}"]
        argv = [*dies_with_parent(), "sh", "-c", KEEPER, str(folder), *kernel, *quiet]
        argv += [f"uml_dir={folder}/", f"init={init}"]
        mark = {ownership.VARIABLE: ownership.current(), "TMPDIR": str(_memory_folder(self._memory_bytes))}
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=self._console,
            env=os.environ | mark,
            pass_fds=(theirs, theirs_too),
            start_new_session=True,  # Ctrl-C at the terminal reaches only the controller
        )
        os.close(theirs)
        os.close(theirs_too)
        return process, answers

    def _read(self, answers: int) -> None:
        """Receive messages until the kernel ends; runs in a thread of its own."""
        with os.fdopen(answers, "rb") as lines:
            for line in lines:
                with suppress(ValueError):
                    self._receive(json.loads(line))
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _receive(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "ended" in message:
                self._codes[message["ended"]] = message["code"]
            elif "ready" in message:
                self._ready = True
            else:
                self._answers[message["id"]] = message
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._gone, timeout_s)
            if not done():
                raise self._failure(what if self._gone else f"{what}, and is silent for {timeout_s:g} s")

    def _failure(self, what: str) -> TestbedError:
        last = one_line(self._last_line()) or "it printed nothing"
        if not self._ready:
            return Unavailable(
                f"substrate uml: the user-mode kernel did not {what} ({last}). Use --on netns or compose"
            )
        return RankFailed(f"substrate uml: the user-mode kernel did not {what} ({last})")

    def _last_line(self) -> str:
        """The last line that the kernel has printed, of a panic the first: a list of its functions follows.

        The file is open from the start, because the keeper removes the folder as soon as the kernel ends.
        """
        if self._console.closed:
            return ""
        printed = os.pread(self._console.fileno(), MAX_CONSOLE_BYTES, 0).decode(errors="replace").strip()
        lines = printed.splitlines() or [""]
        return next((line for line in lines if "Kernel panic" in line), lines[-1])

    def call(self, name: str, **arguments: Any) -> Any:
        """Ask the agent to do this and return its answer. Raises the agent's TestbedError, or that the kernel ended."""
        self._count += 1
        number = self._count
        request = {"id": number, "do": name, "with": arguments}
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._failure(f"answer to {name!r}") from None
        self._wait(lambda: number in self._answers, CALL_TIMEOUT_S, f"answer to {name!r}")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise REFUSALS.get(answer["error"], TestbedError)(answer["text"])
        return RESULTS[name].validate_python(answer["result"]) if name in RESULTS else answer["result"]

    def code(self, number: int, timeout_s: float | None = 0.0) -> int | None:
        """The exit code of a process, for which this waits so long; None if it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes or self._gone, timeout_s)
            if number not in self._codes and self._gone:
                raise self._failure("keep running")
            return self._codes.get(number)


def boot_script(variables: Mapping[str, str], folder: Path, agent: Sequence[str]) -> str:
    """The program that the kernel starts. `env` takes every name; `export` of a shell would end it for some names."""
    own = [f"{name}={text}" for name, text in variables.items()]
    return BOOT.format(folder=shlex.quote(str(folder)), agent=shlex.join(["env", *own, *agent]))


def _memory_folder(size: int) -> Path:
    """Where the kernel keeps its memory, in a file without a name, which it maps as executable."""
    with suppress(OSError):
        found = os.statvfs(SHARED_MEMORY)
        if found.f_bavail * found.f_frsize >= size and not found.f_flag & os.ST_NOEXEC:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the shell that runs the kernel, which then kills it.

    If the shell has not ended in time, kill all processes of its session. Raises TestbedError if they do not end.
    """
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill_until_gone(lambda: pids_of_session(process.pid))
        try:
            process.wait(KILLED_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            rule = f"process {process.pid} of the user-mode kernel does not end, although it was killed"
            raise TestbedError(f"substrate uml: {rule}. End it, then start again.") from None


class UmlProcess:
    """A process of the kernel; `pid` is the agent's number for it, because a long sweep uses a pid more than once."""

    def __init__(self, kernel: Kernel, pid: int) -> None:
        self._kernel = kernel
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._kernel.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise TimeoutError."""
        code = self._kernel.code(self.pid, timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def signal(self, signum: int) -> None:
        """Send a signal; a process that has ended is ignored."""
        self._kernel.call("signal", pid=self.pid, signum=signum)

    def forbid_writing(self) -> None:
        """Make every further write of the process fail."""
        self._kernel.call("forbid_writing", pid=self.pid)


class UmlSubstrate:
    """One shaped namespace per node, in a kernel that leaving the context ends."""

    name = "uml"
    shaped = True
    not_shaped = ""
    one_clock = False  # the kernel has a clock of its own
    python = sys.executable

    def __init__(self, plans: Sequence[NodePlan], folder: Path | None = None) -> None:
        if folder is not None:
            check_visible(folder)
        self._plans = list(plans)
        self._kernel = Kernel(BYTES_OF_KERNEL + BYTES_PER_NODE * len(plans))
        self._cleanup = ExitStack()
        self.nodes: Sequence[NodeHandle] = ()
        self.late_quotas = False
        self.notes: Sequence[str] = [
            f"user-mode Linux: {len(plans)} node{'s' * (len(plans) > 1)} took turns on one processor, and system calls "
            "take several times longer than on the machine's own kernel"
        ]

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(self._kernel)
            made = self._kernel.call("make", plans=PLANS.dump_python(self._plans, mode="json"))
            self.nodes, self.late_quotas = NODES.validate_python(made["nodes"]), made["late_quotas"]
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process on a node; the folder of its log is made writable for the kernel."""
        own = {**env, MAX_PARAMETERS_VARIABLE: str(MAX_PARAMETERS)}
        arguments = {"node": node, "argv": list(argv), "env": own, "log": str(log.resolve()), "quota": quota}
        return UmlProcess(self._kernel, self._kernel.call("start", **arguments))

    def port(self, wanted: int = 0) -> int:
        """Return `wanted` or DEFAULT_PORT, which is always free: a node shares its ports with no other."""
        return wanted or DEFAULT_PORT

    def prepare_folder(self, folder: Path) -> None:
        """Make the run folder writable for the kernel."""
        self._kernel.call("allow_writing", folder=str(folder.resolve()))

    def limit_cpus(self, limited: bool) -> None:
        """Set or lift the quota of every node that has one."""
        self._kernel.call("limit_cpus", limited=limited)

    def stop(self) -> None:
        """End every process that was started."""
        self._kernel.call("stop")

    def kill(self, node: int) -> None:
        """Send SIGKILL to everything in the namespace."""
        self._kernel.call("kill", node=node)

    def pause(self, node: int) -> None:
        """Send SIGSTOP to everything in the namespace."""
        self._kernel.call("pause", node=node)

    def resume(self, node: int) -> None:
        """Send SIGCONT to everything in the namespace."""
        self._kernel.call("resume", node=node)

    def cut(self, node: int) -> None:
        """Set the switch's port down."""
        self._kernel.call("cut", node=node)

    def reconnect(self, node: int) -> None:
        """Set the switch's port up."""
        self._kernel.call("reconnect", node=node)

    def shaping(self, node: int) -> Shaping:
        """The node's link as it is requested now, and as the kernel has it."""
        found: Shaping = self._kernel.call("shaping", node=node)
        return found

    def uplinks(self) -> Mapping[int, Shaping]:
        """The trunk of each rack as it is requested, and as the kernel has it."""
        found: Mapping[int, Shaping] = self._kernel.call("uplinks")
        return found

    def counts(self, node: int) -> NodeCounts:
        """What the kernel counts in the namespace."""
        found: NodeCounts = self._kernel.call("counts", node=node)
        return found

    def set_rate(self, node: int, rate: int | None) -> None:
        """Change the rate both ways while packets flow; None restores the planned rate."""
        self._kernel.call("set_rate", node=node, rate=rate)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Change a node's quota while it runs; None restores the planned quota."""
        self._kernel.call("set_cpus", node=node, cpus=cpus)

    def limit_memory(self, node: int) -> None:
        """Limit the node's memory."""
        self._kernel.call("limit_memory", node=node)

    def unlimit_memory(self, node: int) -> None:
        """Remove the limit."""
        self._kernel.call("unlimit_memory", node=node)


# In the kernel

POWER_OFF = 0x4321FEDC  # of reboot(2)
FINIT_MODULE = 313  # finit_module(2) on x86-64, the one machine that Debian has this kernel for


class Agent:
    """Executes what the controller asks for, one request after the other."""

    def __init__(self, line: int, modules: Path) -> None:
        self._line = line
        self._modules = modules
        self._nodes: Any = None  # NetnsSubstrate
        self._processes: dict[int, Process] = {}  # by numbers that are never used again
        self._started = 0
        self._writable: list[Path] = []

    def serve(self) -> None:
        """Answer requests, and report processes that have ended, until the controller closes the line."""
        rest = b""
        self._send({"ready": True})
        while True:
            if select.select([self._line], [], [], POLL_S)[0]:
                data = os.read(self._line, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
            for number, process in list(self._processes.items()):
                code = process.poll()
                if code is not None:
                    del self._processes[number]
                    self._send({"ended": number, "code": code})

    def _answer(self, request: dict[str, Any]) -> None:
        number, name, arguments = request["id"], request["do"], request["with"]
        try:
            own = getattr(self, f"_{name}", None)
            result = own(**arguments) if own else getattr(self._nodes, name)(**arguments)
        except TestbedError as error:
            self._send({"id": number, "error": type(error).__name__, "text": str(error)})
        except Exception as error:  # of the agent itself; the controller must not wait for an answer
            self._send({"id": number, "error": "TestbedError", "text": f"agent: {type(error).__name__}: {error}"})
        else:
            known = RESULTS.get(name)
            self._send({"id": number, "result": known.dump_python(result, mode="json") if known else result})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._line, data) :]

    def _make(self, plans: list[dict[str, Any]]) -> dict[str, Any]:
        from testbed.control.substrates.netns import NetnsSubstrate, check_network

        wanted = PLANS.validate_python(plans)
        names = {f"tcp_{plan.congestion}" for plan in wanted if plan.congestion}
        load_modules([*MODULES, *names], self._modules)
        check_network(wanted)
        self._nodes = NetnsSubstrate(wanted).__enter__()
        return {"nodes": NODES.dump_python(list(self._nodes.nodes)), "late_quotas": self._nodes.late_quotas}

    def _start(self, node: int, argv: list[str], env: dict[str, str], log: str, quota: bool) -> int:
        self._allow_writing(str(Path(log).parent))
        process = self._nodes.start(node, argv, env, Path(log), quota)
        self._started += 1
        self._processes[self._started] = process
        return self._started

    def _allow_writing(self, folder: str) -> None:
        """Mount a folder of the machine once more, writable."""
        path = Path(folder)
        if not any(path.is_relative_to(each) for each in self._writable):
            _mount("hostfs", path, folder)
            self._writable.append(path)

    def _signal(self, pid: int, signum: int) -> None:
        if pid in self._processes:
            self._processes[pid].signal(signum)

    def _forbid_writing(self, pid: int) -> None:
        if pid in self._processes:
            self._processes[pid].forbid_writing()


def _mount(kind: str, path: Path, data: str) -> None:
    call = ctypes.CDLL(None, use_errno=True).mount
    if call(b"none", os.fsencode(path), kind.encode(), 0, os.fsencode(data)) != 0:
        raise TestbedError(f"{path}: cannot be mounted for writing ({os.strerror(ctypes.get_errno())})")


def load_modules(names: Sequence[str], folder: Path) -> None:
    """Load these modules of the kernel, each after those that it needs. One that the folder lacks may be built in.

    Raises Unavailable for one that the kernel refuses.
    """
    needed: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        file, _, rest = line.partition(":")
        needed[file] = rest.split()
    files = {Path(file).name.partition(".")[0]: file for file in needed}
    init = ctypes.CDLL(None, use_errno=True).syscall
    for name in names:
        for file in [*reversed(needed.get(files.get(name, ""), [])), *([files[name]] if name in files else [])]:
            descriptor = os.open(folder / file, os.O_RDONLY)
            code = ctypes.get_errno() if init(FINIT_MODULE, descriptor, b"", 0) else 0
            os.close(descriptor)
            if code not in (0, errno.EEXIST):
                rule = f"the user-mode kernel {os.uname().release} refuses its module {name} ({os.strerror(code)})"
                raise Unavailable(f"substrate uml: {rule}: {folder / file}. Fetch both again: make uml")


def main() -> None:
    """Be the agent: serve the controller at the other end of a serial line, then switch the kernel off."""
    device, modules = sys.argv[1:]
    line = os.open(device, os.O_RDWR | os.O_NOCTTY)
    tty.setraw(line)
    try:
        Agent(line, Path(modules)).serve()
    finally:
        ctypes.CDLL(None).reboot(POWER_OFF)


if __name__ == "__main__":
    main()
