"""All exceptions of the testbed with their exit codes, and functions that format messages.

TestbedError                  1   any failure that has no class of its own
├── UsageError                2   the request cannot be met: the message has the value, the rule and the way out
│   ├── SpecError                 a value in a mode, spec, experiment or inventory
│   ├── NoClosedForm              a collective of a script cannot be replaced by a calculation (closed_form.py)
│   ├── SchemaError               a file written by another version of the schema
│   └── Unavailable               this machine lacks something (root, a port, data, a kernel module)
├── RankFailed                3   a rank died or hung; the message names it
│   └── PeerLost              6   this rank works, but another one was lost; the message names it
├── ReplicasDiffer            4   parameters are not equal on all ranks
├── NetworkInvalid            5   shaping failed, or the receipt is off by more than the tolerance
│   └── ProbeError                the probe of the network could not finish
├── DiskFull                  7   a rank cannot write any more; the exit code gives the controller the reason
├── ChannelClosed             1   a control connection ended, or received something that is not a message
├── CommandFailed             1   a command failed; the exception has its exit code and output
├── HostFailed                2   an operation on a host failed; the message begins with its name
│   ├── KeyUnknown                the host answers, but its host key is not the known one
│   ├── AuthenticationFailed      the host answers, but does not accept our user or key
│   └── HostCommandFailed         a command on the host failed (also a CommandFailed)
├── ConnectionLost            3   a connection that a run needs broke; processes at its other end may keep running
│   ├── EngineLost                the Docker engine of this machine stopped answering during a run
│   └── AllocationLost            the Slurm job that held the nodes of a run ended before the run
└── Interrupted             130   Ctrl-C or SIGTERM; what was measured is kept

All packages raise these. Messages quote files and the output of programs, which are not trusted: control
characters are replaced when a message is printed, and `quote` and `one_line` limit the length of what is quoted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

MAX_QUOTE_CHARS = 400  # of a value in a message


class TestbedError(Exception):
    """Base class. `exit_code` is the exit code of the process; `folder` is the run folder, if a run was started."""

    __test__ = False  # pytest: not a test class
    exit_code = 1
    folder: Path | None = None

    def __str__(self) -> str:
        return strip_control_chars(super().__str__())


class UsageError(TestbedError):
    """The request cannot be met as it stands; nothing was created. `refuse` sets the parts of the message."""

    exit_code = 2
    rule = way_out = ""


class SpecError(UsageError):
    """A value in a mode, spec, experiment or inventory breaks a rule."""


class NoClosedForm(UsageError):
    """A collective of a script cannot be replaced. The message completes a sentence that begins "OPERATION at LINE"."""


class SchemaError(UsageError):
    """A file has another schema number than this version reads."""


class Unavailable(UsageError):
    """This machine cannot do what was requested; the message says what is missing."""


class RankFailed(TestbedError):
    """A rank ended with an error or did not end at all."""

    exit_code = 3


class PeerLost(RankFailed):
    """This rank works, but another rank was lost: `failed_rank`, or None if it is unknown which."""

    exit_code = 6

    def __init__(self, message: str, failed_rank: int | None = None) -> None:
        super().__init__(message)
        self.failed_rank = failed_rank


class ReplicasDiffer(TestbedError):
    """Parameters or their hashes differ between ranks that must agree."""

    exit_code = 4


class NetworkInvalid(TestbedError):
    """The network is not the requested one."""

    exit_code = 5


class ProbeError(NetworkInvalid):
    """The probe of the network could not finish."""


class DiskFull(TestbedError):
    """A rank cannot write any more, not even its error record; the exit code gives the controller the reason."""

    exit_code = 7


class ChannelClosed(TestbedError):
    """The other end of a control connection is closed, or sent something that is not a message."""


class CommandFailed(TestbedError):
    """A command failed; `code` is its exit code (124 at a timeout), `output` its stderr, or else its stdout."""

    def __init__(self, message: str, code: int, output: str) -> None:
        super().__init__(message)
        self.code, self.output = code, output


class HostFailed(TestbedError):
    """An operation on a host failed; the message begins with the name of the host."""

    exit_code = 2


class KeyUnknown(HostFailed):
    """The host answers, but its host key is not the known one."""


class AuthenticationFailed(HostFailed):
    """The host answers, but does not accept our user or key."""


class HostCommandFailed(HostFailed, CommandFailed):
    """A command on a host failed."""


class ConnectionLost(TestbedError):
    """A connection that a run needs broke, e.g. to a host; processes at its other end may keep running."""

    exit_code = 3


class EngineLost(ConnectionLost):
    """The Docker engine of this machine stopped answering; its containers may still run."""

    way_out = "Start the engine again (make engine)"


class AllocationLost(ConnectionLost):
    """The Slurm job that held the nodes ended: time limit, preemption, scancel, a failed node."""

    def __init__(self, message: str, way_out: str = "Submit it again") -> None:
        super().__init__(message)
        self.way_out = way_out


class Interrupted(TestbedError):
    """Stopped by the user; what was measured so far is on disk."""

    exit_code = 130


def refuse(what: str, value: object, rule: str, way_out: str, kind: type[UsageError] = SpecError) -> UsageError:
    """Return the exception for a value that breaks a rule: "mode 'rong': unknown algorithm. Use ring or tree."."""
    error = kind(f"{what} {quote(value)}: {rule}. {way_out}")
    error.rule, error.way_out = rule, way_out
    return error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar known word, to append to a message; "" if none is similar."""
    similar = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {similar[0]}?" if similar else ""


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Raise Unavailable if a package of this extra (pyproject.toml) is not installed; nothing is imported."""
    for package in packages:
        found = find_spec(package)
        if found is None or found.origin is None:  # without origin it is a folder of that name, e.g. docker/ of a clone
            rule = f"needs the package {package} of the extra `{extra}`, which is not installed"
            raise Unavailable(f"{what}: {rule}. Install it with: pip install 'testbed[{extra}]'")


def quote(value: object) -> str:
    """Return a value as a message prints it: escaped, and cut if it is long."""
    return _cut(repr(value))


def one_line(text: str) -> str:
    """Return untrusted text as a message prints it: one line, without control characters, and cut if it is long."""
    return _cut(" ".join(strip_control_chars(text).split()))


def strip_control_chars(text: str) -> str:
    """Return the text with "?" in place of each non-printable character except newline and tab."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTE_CHARS else f"{text[:MAX_QUOTE_CHARS]}... ({len(text)} characters)"
