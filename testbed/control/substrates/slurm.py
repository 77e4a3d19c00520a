"""Nodes of a Slurm cluster: one job holds them, and srun starts one task on each.

    login node                        job 12 (sbatch, JOB_SCRIPT)
    testbed run --on slurm  --srun-->  n0: rank 0    n1: rank 1    ...
            ^------------ run folder on the disk that all share ------------'

The network is measured and never shaped. `Reservation` holds the nodes: a job of its own, or inside an allocation
(SLURM_JOB_ID) that one. A sweep keeps one reservation over all its runs. Options become single arguments `--key=value`
of sbatch, and the script is a constant: nothing is put into a shell. sbatch and srun get a list of variables, not the
caller's environment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from testbed.control.machine.processes import TIMEOUT_CODE, run
from testbed.control.substrates.base import NodeHandle, NodePlan, Process, UnchangedNodes, rank_argv
from testbed.control.substrates.process import STOP_GRACE_S, LocalProcess, package_path, spawn
from testbed.control.substrates.process import stop as stop_local
from testbed.results.folder import write_whole
from testbed.spec.datasets import MARKER, data_dir, dataset_info
from testbed.spec.errors import (
    AllocationLost,
    CommandFailed,
    Interrupted,
    Unavailable,
    did_you_mean,
    one_line,
    refuse,
)
from testbed.spec.run import RunSpec

LOG = logging.getLogger(__name__)
SLURM_FILE = "slurm.json"  # in the run's folder: the job and the nodes; `testbed collect` finds the run by it
JOB_VARIABLE = "SLURM_JOB_ID"  # set inside an allocation
JOB_NAME = "testbed"  # a job's own has a random number behind it
STEP_PREFIX = f"{JOB_NAME}-"  # of the names of steps with a rank or its probe
PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
NEVER_CHANGED = "a fault never changes the network, CPU, memory or disk of a cluster's node. Use --on compose or netns"
COMMAND_TIMEOUT_S = 30.0  # each of these commands takes a moment
PATIENCE_S = 60.0  # for a slurmctld that does not answer, e.g. because it restarts
SURVEY_TIMEOUT_S = 90.0
CHECK_TIMEOUT_S = 30.0  # for a step that does nothing; where slurmd is dead it fails within 10 s
STEP_TIMEOUT_S = 10.0  # for Slurm to list a step that srun has begun
END_TIMEOUT_S = 120.0  # for a job that is ending to show how it ended; Slurm's KillWait is 30 s, and an epilog follows
POLL_S = 0.5
MAX_VALUE_CHARS = 1000
MAX_POLL_S = 5.0  # between two looks at a job that waits in the queue

# The job does nothing: its controller starts the ranks with srun and cancels it at the end. A job without a step for
# two minutes has lost its controller, and ends. On a node that cannot call squeue it looks for the processes of steps
# on that node, where rank 0 runs. A step that it does not find may still run, so the job then ends after ten minutes.
JOB_SCRIPT = """#!/bin/sh
idle=0 unknown=0
while [ "$idle" -lt 120 ] && [ "$unknown" -lt 600 ]; do
  sleep 10
  if steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i); then
    unknown=0
    case $(printf '%s\\n' "$steps" | grep -v -e '\\.batch' -e '\\.extern' -e '^$') in
      '') idle=$((idle + 10)) ;;
      *) idle=0 ;;
    esac
  elif grep -qs "^slurmstepd: \\[$SLURM_JOB_ID\\.[0-9]" /proc/[0-9]*/cmdline; then
    idle=0 unknown=0
  else
    unknown=$((unknown + 10))
  fi
done
"""

# Options of sbatch that a user may set by --slurm-option; those without a value are flags. What would change how the
# run is started, where it writes or what it inherits is not among them.
OPTIONS = {
    "constraint", "cores-per-socket", "deadline", "exclude", "gres", "hint", "licenses", "mem", "mem-per-cpu", "nice",
    "nodelist", "prefer", "qos", "reservation", "sockets-per-node", "switches", "threads-per-core", "tmp", "wckey",
}  # fmt: skip
FLAGS = {"contiguous", "exclusive", "spread-job"}
# What sbatch, srun and so the ranks inherit of the caller's variables.
INHERITED = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS",
    "SBATCH_TIMELIMIT", "SLURM_CONF", "TERM", "TZ", "USER",
)  # fmt: skip


# Options


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a user requests of Slurm; empty: Slurm's own default. Raises SpecError for a value that is not allowed."""

    partition: str = ""
    account: str = ""
    time: str = ""  # limit, as sbatch takes it: minutes, or HH:MM:SS
    options: Sequence[str] = ()  # KEY=VALUE, or KEY for a flag
    python: str = ""  # on the nodes; empty: this one

    def __post_init__(self) -> None:
        for name in ("partition", "account", "time", "python"):
            _check_value(f"--{name}", getattr(self, name))
        if self.python.startswith("-"):
            raise refuse("--python", self.python, "srun would take it for an option", "Write ./ before it.")
        for text in self.options:
            _check_option(text)

    @property
    def interpreter(self) -> str:
        """The Python command of the nodes. A task begins in the folder /, so a path must not depend on the present one.

        Links stay: a virtual environment is found by the path of its link to the interpreter.
        """
        return str(Path(self.python).absolute()) if "/" in self.python else self.python or sys.executable

    @property
    def given(self) -> list[str]:
        """The names of the options that are set."""
        named = {"--partition": self.partition, "--account": self.account, "--time": self.time}
        named |= {"--slurm-option": "".join(self.options), "--python": self.python}
        return [name for name, value in named.items() if value]

    def argv(self) -> list[str]:
        """The arguments of sbatch, one per option."""
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        return [*(f"--{name}={value}" for name, value in named.items() if value), *(f"--{o}" for o in self.options)]


def _check_value(what: str, value: str) -> None:
    if not value.isprintable() or len(value) > MAX_VALUE_CHARS:
        rule = f"must be printable and at most {MAX_VALUE_CHARS} characters"
        raise refuse(what, value, rule, "Give it as you would to sbatch.")


def _check_option(text: str) -> None:
    key, equals, value = text.partition("=")
    if key == "cpus-per-task":
        rule = "a rank gets as many CPUs as it has threads"
        raise refuse("--slurm-option", text, rule, "Use --set threads=K for K of both.")
    if key not in OPTIONS | FLAGS:
        allowed = f"Allowed: {', '.join(sorted(OPTIONS | FLAGS))}."
        raise refuse("--slurm-option", text, f"{key!r} is not allowed{did_you_mean(key, OPTIONS | FLAGS)}", allowed)
    if key in OPTIONS and not value:
        raise refuse("--slurm-option", text, f"{key} needs a value", f"Write --slurm-option {key}=VALUE.")
    if equals and key in FLAGS:
        raise refuse("--slurm-option", text, f"{key} takes no value", f"Write --slurm-option {key}.")
    _check_value("--slurm-option", text)


def submit_argv(options: SlurmOptions, nodes: int, cpus: int, name: str = JOB_NAME) -> list[str]:
    """The command that submits the job; its script is on stdin. What a user sets comes last and wins."""
    own = ["--parsable", f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    return ["sbatch", *own, "--output=/dev/null", "--chdir=/", "--no-requeue", *options.argv()]


def step_argv(job: str, nodes: Sequence[str], name: str, cpus: int) -> list[str]:
    """The part of an srun command line before the program: one task on each of these nodes of a job.

    --overlap: another step of the job, e.g. the user's shell, may have the same CPUs.
    """
    place = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
    own = [f"--jobid={job}", "--overlap", *place, f"--cpus-per-task={cpus}", f"--job-name={name}"]
    return ["srun", *own, "--input=none", "--chdir=/", "--mpi=none"]


def variables() -> dict[str, str]:
    """The caller's variables that sbatch and srun get: no token that he may have in his environment."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def ask(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S, text: str = "") -> str:
    """The output of a Slurm command. Raises CommandFailed."""
    return run(argv, timeout_s, env=variables(), text=text)


# State


@dataclass(frozen=True, kw_only=True)
class Job:
    """What squeue says of a job; GONE if Slurm has forgotten it."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    partition: str = ""
    limit: str = ""
    start: str = ""


GONE = "GONE"
RUNNING = ("RUNNING", "SUSPENDED")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "RESV_DEL_HOLD", "REQUEUE_HOLD", "SPECIAL_EXIT")
# What a job that is being ended will be, by Slurm's reason; of one that was cancelled or preempted there is no reason.
ENDING = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "OutOfMemory": "OUT_OF_MEMORY", "DeadLine": "DEADLINE"}
FORMAT = "%A|%T|%N|%P|%l|%S|%r"  # %A is the number in SLURM_JOB_ID; %i of a task of a job array is 9_1


def parse_job(job: str, output: str) -> Job:
    """Parse a line of squeue in FORMAT; the reason is last because it is free text."""
    for line in output.splitlines():
        fields = line.strip().split("|", 6)
        if len(fields) == 7 and fields[0] == job:
            _, state, nodes, partition, limit, start, reason = fields
            state = ENDING.get(reason, state) if state == "COMPLETING" else state
            return Job(id=job, state=state, nodes=nodes, partition=partition, limit=limit, start=start, reason=reason)
    return Job(id=job, state=GONE)


def look_at(job: str) -> Job:
    """The job's state. Raises CommandFailed if Slurm does not answer."""
    try:
        return parse_job(job, ask("squeue", "--noheader", f"--jobs={job}", "--states=all", f"--format={FORMAT}"))
    except CommandFailed as error:
        if "invalid job id" in error.output.lower():
            return Job(id=job, state=GONE)
        raise


def find_job(job: str) -> Job:
    """The job's state. A slurmctld that does not answer is asked again for PATIENCE_S; then Unavailable is raised."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return look_at(job)
        except CommandFailed as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"Slurm does not answer: {one_line(error.output)}. Try `squeue`") from None
            time.sleep(POLL_S)


def running_steps(job: str) -> dict[str, str]:
    """The names of the steps of a job that we have started, and their ids; not those of Slurm itself or of its user."""
    output = ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j")
    return parse_steps(output)


def parse_steps(output: str) -> dict[str, str]:
    pairs = [line.strip().partition("|")[::2] for line in output.splitlines()]
    ours = [(name, step) for step, name in pairs if name.startswith(STEP_PREFIX)]
    return {name: step for name, step in ours if step.rpartition(".")[2].isdecimal()}


def how_it_ended(job: Job) -> AllocationLost:
    """The error for a job that no longer holds its nodes."""
    again = "Submit it again"
    failed = (not_usable(job.nodes) or job.nodes) if job.state in ("NODE_FAIL", "BOOT_FAIL") else ""
    ends = {
        "TIMEOUT": (f"reached its time limit of {job.limit}", "Give it longer with --time"),
        "PREEMPTED": ("was preempted by a job of higher priority", again),
        "CANCELLED": ("was cancelled (scancel)", again),
        "NODE_FAIL": (
            f"lost a node that failed ({failed})",
            f"{again}, or without it: --slurm-option exclude=NAME",
        ),
        "BOOT_FAIL": (f"lost a node that did not boot ({failed})", again),
        "OUT_OF_MEMORY": ("used more memory than it had requested", "Request more, e.g. --slurm-option mem=8G"),
        "DEADLINE": ("reached its deadline", "Request a later one"),
        "COMPLETING": ("is being ended by Slurm", "See `squeue`"),
        GONE: ("no longer exists", "See `sacct`"),
    }
    what, way_out = ends.get(job.state, (f"ended with state {job.state} ({job.reason})", again))
    return AllocationLost(f"Slurm job {job.id} {what}", way_out)


def before_the_run(lost: AllocationLost) -> AllocationLost:
    """The same error as a whole message; run.py adds to it what a run has measured, if there is a run."""
    return AllocationLost(f"{lost}. {lost.way_out}.")


def not_usable(nodes: str) -> str:
    """Those of these nodes that Slurm cannot use now; "" if there is none, or it does not say."""
    with contextlib.suppress(CommandFailed, FileNotFoundError):
        return parse_down(ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T"))
    return ""


def parse_down(output: str) -> str:
    """The nodes whose state is down or fail, or ends with `*`: they do not answer."""
    rows = dict.fromkeys(tuple(line.split()) for line in output.splitlines() if len(line.split()) == 2)
    return ", ".join(name for name, state in rows if re.match(r"down|fail|unknown|.*\*$", state))


# Hold nodes


def partitions() -> list[str]:
    """The partitions of this machine's cluster. Raises Unavailable, or CommandFailed if Slurm does not answer."""
    check_programs()
    return list(dict.fromkeys(ask("sinfo", "--noheader", "--format=%R").split()))


def check_programs() -> None:
    """Raise Unavailable if a command of Slurm is missing here."""
    for name in PROGRAMS:
        if shutil.which(name) is None:
            rule = f"substrate slurm: the command {name} is missing"
            raise Unavailable(f"{rule}. Use a login node of a Slurm cluster, or another substrate (`testbed doctor`)")


def check(options: SlurmOptions, nodes: int, cpus: int) -> None:
    """Raise Unavailable if Slurm is not here or would not accept the job. Nothing is submitted."""
    check_programs()
    if job := os.environ.get(JOB_VARIABLE, ""):
        if given := [name for name in options.given if name != "--python"]:
            rule = f"this is inside Slurm job {job}, which is used as it is"
            raise Unavailable(f"{', '.join(given)}: {rule}. Leave it out, or unset {JOB_VARIABLE} for a job of its own")
        _check_allocation(find_job(job), nodes)
        return
    try:
        ask(*submit_argv(options, nodes, cpus), "--test-only", text=JOB_SCRIPT)
    except CommandFailed as error:
        raise _refused(error, options, nodes) from None


def _check_allocation(job: Job, nodes: int) -> list[str]:
    """The nodes of an existing allocation. Raises Unavailable if it has ended or has too few."""
    if job.state not in RUNNING:
        raise Unavailable(
            f"{how_it_ended(job)}, but {JOB_VARIABLE} names it. Unset {JOB_VARIABLE} for a job of its own"
        )
    names = host_names(job.nodes)
    if len(names) < nodes:
        rule = f"{nodes} nodes: Slurm job {job.id}, which this is inside of, has {len(names)}"
        raise Unavailable(f"{rule}. Use --nodes {len(names)}, or allocate more")
    return names


def host_names(nodes: str) -> list[str]:
    """The names in Slurm's short form of a list: n[0-3] is n0, n1, n2, n3."""
    return ask("scontrol", "show", "hostnames", nodes).split()


def _refused(error: CommandFailed, options: SlurmOptions, nodes: int) -> Unavailable:
    """What sbatch says, in one sentence, with the partitions that exist if it did not know one."""
    lines = [re.sub(r"^(sbatch: )?(error: )?", "", line) for line in error.output.splitlines() if line.strip()]
    said = one_line("; ".join(dict.fromkeys(lines)))
    what = f"--partition {options.partition}: " if "partition" in said.lower() and options.partition else ""
    way_out = "See `sinfo`, and the options --partition, --account, --time and --slurm-option"
    if what:
        with contextlib.suppress(CommandFailed):
            way_out = f"There are: {', '.join(partitions())}"
    return Unavailable(f"{what}Slurm refuses a job of {nodes} node{'s' * (nodes != 1)}: {said}. {way_out}.")


class Reservation:
    """The nodes of a run, or of all runs of a sweep, while `hold` is entered."""

    def __init__(self, options: SlurmOptions, nodes: int, cpus: int) -> None:
        self.options, self.size, self.cpus = options, nodes, cpus
        self.job = ""
        self.job_name = ""  # of a job of our own, which no other job has; empty for one that the user made
        self.names: list[str] = []

    @contextmanager
    def hold(self, report: Callable[[str], None]) -> Iterator[None]:
        """Wait for the nodes and report Slurm's reasons; at the end cancel the job, unless the user made it."""
        self._begin(report)
        try:
            yield
        finally:
            self._end()

    def _begin(self, report: Callable[[str], None]) -> None:
        if job := os.environ.get(JOB_VARIABLE, ""):
            self.names = _check_allocation(find_job(job), self.size)
            self.job, self.job_name = job, ""
            report(f"inside Slurm job {job}: {', '.join(self.names[: self.size])}")
            return
        self.job_name = f"{JOB_NAME}-{secrets.token_hex(4)}"
        try:
            self._submit()
            self.names = self._wait(report)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted while waiting for Slurm; {self._end()}") from None
        except BaseException:
            self._end()
            raise

    def _submit(self) -> None:
        """Submit the job. A signal takes effect when its id is known: a job of unknown id would stay."""
        argv = submit_argv(self.options, self.size, self.cpus, self.job_name)
        with _signals_deferred():
            try:
                self.job = ask(*argv, timeout_s=COMMAND_TIMEOUT_S, text=JOB_SCRIPT).strip().partition(";")[0]
            except CommandFailed as error:
                if error.code == TIMEOUT_CODE:
                    raise self._not_answered() from None
                raise _refused(error, self.options, self.size) from None

    def _not_answered(self) -> Unavailable:
        """Cancel what sbatch may have submitted although it was ended before its answer came."""
        cancel = ("scancel", f"--name={self.job_name}")
        with contextlib.suppress(CommandFailed):
            ask(*cancel)
        LOG.warning("If `squeue` shows a job %s later, end it: %s", self.job_name, shlex.join(cancel))
        rule = f"sbatch has not answered in {COMMAND_TIMEOUT_S:g} s, and was ended"
        return Unavailable(f"Slurm does not answer: {rule}. Try again later")

    def _wait(self, report: Callable[[str], None]) -> list[str]:
        said, pause = "", 0.1
        while True:
            job = find_job(self.job)
            if job.state in RUNNING:
                names = host_names(job.nodes)
                report(f"Slurm job {job.id} has {', '.join(names)}")
                return names
            if job.state not in WAITING:
                raise before_the_run(self.lost() or how_it_ended(job))
            text = f"Slurm job {job.id} waits in partition {job.partition}: {job.reason}"
            text += f", expected to start at {job.start}" if job.start not in ("", "N/A") else ""
            if text != said and job.reason not in ("None", ""):
                said = text
                report(text)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)

    def lost(self, node: str = "", *, by_signal: bool = False) -> AllocationLost | None:
        """The error if the job no longer holds its nodes, or `node` does not answer; else None.

        Waits while Slurm ends the job, to know why: srun may know of a failed node before the job's state shows it.
        `by_signal`: a signal ended the node's task. Slurm notices a dead slurmd only after SlurmdTimeout, so the node
        is tried with a step that does nothing.
        """
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            job = find_job(self.job)
            down = job.state in RUNNING and node and not_usable(node)
            if not (down or job.state == "COMPLETING") or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if down or (job.state in RUNNING and by_signal and not self._takes_a_step(node)):
            return how_it_ended(replace(job, state="NODE_FAIL", nodes=node))
        # while a job is being ended, squeue lists only the nodes that are not yet free
        return None if job.state in RUNNING else how_it_ended(replace(job, nodes=",".join(self.names) or job.nodes))

    def _takes_a_step(self, node: str) -> bool:
        try:
            ask(*step_argv(self.job, [node], "check", self.cpus), "true", timeout_s=CHECK_TIMEOUT_S)
        except CommandFailed:
            return False
        return True

    def _end(self) -> str:
        """Cancel the job if it is our own, and return what became of it. A job that stays is also logged."""
        with _signals_deferred():
            became = self._cancel() if self.job and self.job_name else "there is no job"
            self.job, self.job_name, self.names = "", "", []
        return became

    def _cancel(self) -> str:
        try:
            ask("scancel", self.job)
        except CommandFailed as error:
            if not _has_ended(self.job):
                reason = one_line(error.output) or "scancel does not answer"
                left = f"job {self.job} is not cancelled ({reason}). End it: scancel {self.job}"
                LOG.warning("Slurm %s", left)
                return left
        return f"job {self.job} is cancelled"


def _has_ended(job: str) -> bool:
    """True if Slurm says that a job has ended, or is being ended."""
    try:
        return look_at(job).state not in (*RUNNING, *WAITING)
    except CommandFailed:
        return False


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP take effect at the end: the exception that they raise would end a command.

    In another thread than the main one they raise nothing. Blocking them would not do: the kernel then gives them to
    another thread of this process, e.g. that of the progress.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before[number] = signal.signal(number, lambda signum, frame: received.append(signum))
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in dict.fromkeys(received):
            signal.raise_signal(signum)


# Processes


class SlurmProcess:
    """A step with one task. Its srun runs here, so its output and exit code arrive here."""

    def __init__(self, srun: LocalProcess, name: str, node: int, host: str, reservation: Reservation) -> None:
        self.srun, self.name, self.node, self._host, self._reservation = srun, name, node, host, reservation
        self.pid = srun.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. Raises AllocationLost."""
        if self._code is None and (code := self.srun.poll()) is not None:
            if code and (lost := self._reservation.lost(self._host, by_signal=task_code(code) < 0)):
                raise lost
            self._code = task_code(code)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise TimeoutError."""
        return task_code(self.srun.wait(timeout))

    def signal(self, signum: int) -> None:
        """Send a signal to the task by Slurm: srun itself would end the step for some of them."""
        if self.srun.poll() is None:
            signal_steps(self._reservation.job, [self], signum)

    def forbid_writing(self) -> None:
        raise Unavailable(NEVER_CHANGED)


def task_code(code: int) -> int:
    """The exit code of a task, from that of its srun: 128 + N means that signal N ended it."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code


def signal_steps(job: str, processes: Sequence[SlurmProcess], signum: int) -> None:
    """Send a signal to all processes of these steps. A step that Slurm does not list yet is waited for."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    waiting = list(processes)
    while waiting and time.monotonic() < deadline:
        with contextlib.suppress(CommandFailed):
            steps = running_steps(job)
            found = [process for process in waiting if process.name in steps]
            if found:
                # scancel may report an error although it has sent the signal
                with contextlib.suppress(CommandFailed):
                    ask("scancel", f"--signal={signal.Signals(signum).name[3:]}", *(steps[p.name] for p in found))
            waiting = [process for process in waiting if process not in found and process.srun.poll() is None]
        if waiting:
            time.sleep(POLL_S / 5)


class SlurmSubstrate(UnchangedNodes):
    """The first nodes of a reservation, which is held, in rank order. Other users may use them too."""

    name = "slurm"
    unchanged = NEVER_CHANGED
    one_clock = False

    def __init__(
        self,
        plans: Sequence[NodePlan],
        folder: Path,
        spec: RunSpec,
        reservation: Reservation,
        notes: Sequence[str] = (),
    ) -> None:
        self._plans, self._folder, self._spec, self._reservation = tuple(plans), folder.resolve(), spec, reservation
        self.python = reservation.options.interpreter
        self.notes = tuple(notes)
        self.nodes: Sequence[NodeHandle] = ()
        self._port = 0
        self._started: list[SlurmProcess] = []
        self._count = itertools.count()

    def __enter__(self) -> Self:
        self.nodes = self._survey(self._reservation.names[: len(self._plans)])
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _survey(self, names: Sequence[str]) -> tuple[NodeHandle, ...]:
        """Ask every node for its interface and address, and whether it has the files of the run. Raises Unavailable."""
        addresses = parse_addresses(ask("scontrol", "show", "node", ",".join(names), "--oneliner"))
        common = [self.python, "-P", "-m", "testbed.net.endpoint", "--names", ",".join(names)]
        common += ["--addresses", ",".join(addresses.get(name, name) for name in names), "--port", str(self._spec.port)]
        mark = self._folder.parent / f".{self._folder.name}.shared"
        mark.touch()
        try:
            needed = [mark, *self._files()]
            sees = [word for path in needed for word in ("--sees", str(path))]
            argv = [*step_argv(self._reservation.job, names, "survey", 1), *common, *sees]
            output = run(argv, SURVEY_TIMEOUT_S, env={**variables(), "PYTHONPATH": package_path()})
        except CommandFailed as error:
            if lost := self._reservation.lost():
                raise before_the_run(lost) from None
            rule = f"python {self.python}: cannot be started on {', '.join(names)}: {one_line(error.output)}"
            way_out = "It and this package must be on a disk that all nodes share; --python PATH names another"
            raise Unavailable(f"{rule}. {way_out}") from None
        finally:
            mark.unlink(missing_ok=True)
        found = parse_survey(output, names, {str(mark): str(self._folder.parent)})
        self._port = int(found[0]["port"])
        return tuple(
            NodeHandle(name=name, address=str(each["address"]), interface=str(each["interface"]))
            for name, each in zip(names, found, strict=True)
        )

    def _files(self) -> list[Path]:
        if self._spec.script is not None:
            return [Path(self._spec.script.folder)]
        name = self._spec.data.name
        return [] if dataset_info(name).generated else [data_dir().resolve() / name / MARKER]

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a step on one node. Its srun does not end with this controller, so that the ranks can finish."""
        name = f"{STEP_PREFIX}{os.getpid()}-{next(self._count)}"
        cpus = self._reservation.cpus if quota else 1
        host = self.nodes[node].name
        step = step_argv(self._reservation.job, [host], name, cpus)
        srun = spawn([*step, *argv], env, log, inherited=variables(), outlives_controller=True)
        self._started.append(process := SlurmProcess(srun, name, node, host, self._reservation))
        return process

    def port(self, wanted: int = 0) -> int:
        """The port of the first node that was free when it was asked."""
        return self._port

    def prepare_folder(self, folder: Path) -> None:
        """Write slurm.json: the job, its name if it is our own, and the names of its nodes."""
        held = self._reservation
        content = {"job": held.job, "name": held.job_name, "nodes": [node.name for node in self.nodes]}
        write_whole(folder / SLURM_FILE, json.dumps(content, indent=1))

    def stop(self) -> None:
        """Send SIGTERM to all steps, and SIGKILL after STOP_GRACE_S."""
        running = [process for process in self._started if process.srun.poll() is None]
        self._started.clear()
        if not running:
            return
        job = self._reservation.job
        signal_steps(job, running, signal.SIGCONT)  # a paused process does not react to SIGTERM
        signal_steps(job, running, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and any(process.srun.poll() is None for process in running):
            time.sleep(POLL_S / 5)
        if left := [process for process in running if process.srun.poll() is None]:
            signal_steps(job, left, signal.SIGKILL)
        stop_local(process.srun for process in running)

    def kill(self, node: int) -> None:
        """Send SIGKILL to the node's steps."""
        self._signal(node, signal.SIGKILL)

    def pause(self, node: int) -> None:
        """Stop all processes of the node's steps."""
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Continue them."""
        self._signal(node, signal.SIGCONT)

    def _signal(self, node: int, signum: int) -> None:
        own = [process for process in self._started if process.node == node and process.srun.poll() is None]
        signal_steps(self._reservation.job, own, signum)


def parse_addresses(output: str) -> dict[str, str]:
    """Names and addresses of nodes, from `scontrol show node --oneliner`."""
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in output.splitlines()]
    return {row["NodeName"]: row["NodeAddr"] for row in rows if "NodeAddr" in row}


def parse_survey(output: str, names: Sequence[str], shown: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each node printed, in the order of `names`. Raises Unavailable for all nodes that lack something.

    `shown`: instead of these paths, others are named in the message.
    """
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = {line["node"]: line for line in lines}
    problems = [f"{name} did not answer" for name in names if name not in found]
    for name, each in found.items():
        if each["problem"] or each["busy"]:
            busy = f"port {each['port']} cannot be used ({each['busy']}); --set port=0 takes a free one"
            problems.append(f"{name}: {each['problem'] or busy}")
        if each["missing"]:
            paths = ", ".join(shown.get(path, path) for path in each["missing"])
            problems.append(f"{name} does not see {paths}, which must be on a disk that all nodes share")
    if problems:
        raise Unavailable(f"substrate slurm: {'; '.join(problems)}.")
    return [found[name] for name in names]


# Describe


def describe(options: SlurmOptions, spec: RunSpec, nodes: int, cpus: int) -> str:
    """What --dry-run prints: the command, the script on its stdin, and the command that starts a rank."""
    job = os.environ.get(JOB_VARIABLE, "")
    started = rank_argv(options.interpreter, spec.script is not None, "RUN")
    rank = shlex.join([*step_argv(job or "JOB", ["NODE"], "rank0", cpus), *started])
    if job:
        return f"# inside Slurm job {job}: nothing is submitted\n\n# on each node:\n{rank}"
    submit = shlex.join(submit_argv(options, nodes, cpus))
    return f"{submit} <<'END'\n{JOB_SCRIPT}END\n\n# on each node:\n{rank}"
