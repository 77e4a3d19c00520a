"""Every failure a person can meet, and the exit code a script sees.

TestbedError            1   anything of ours that went wrong
├── UsageError          2   the request cannot be met: it prints the value, the rule and the way out
│   ├── SpecError           a value in a mode, spec, experiment or inventory
│   ├── SchemaError         a file written by another version of the schema
│   └── Unavailable         this machine lacks something (root, a port, data, a kernel module)
├── RankFailed          3   a rank died or hung; names it
│   └── PeerLost        6   what a rank ends with that did nothing wrong itself: another was lost, and is named
├── ReplicasDiffer      4   parameters are not equal on all ranks
├── NetworkInvalid      5   shaping failed, or the receipt is off by more than the tolerance
│   └── ProbeError          the probe of the network could not finish
├── ChannelClosed           a control connection ended, or carried something that is no message
└── Interrupted       130   Ctrl-C or SIGTERM; what was measured is kept
"""

from __future__ import annotations

from importlib.util import find_spec

LONGEST = 400  # characters of a value in a message


class TestbedError(Exception):
    """Base of all; `exit_code` is what the process ends with."""

    __test__ = False  # not a test class, whatever its name suggests to pytest
    exit_code = 1

    def __str__(self) -> str:
        """Messages quote files, and files may be a stranger's."""
        return harmless(super().__str__())


class UsageError(TestbedError):
    """The request cannot be met as it stands; nothing was created."""

    exit_code = 2


class SpecError(UsageError):
    """A value breaks a rule of the vocabulary."""


class SchemaError(UsageError):
    """A file speaks another version of the schema."""


class Unavailable(UsageError):
    """This machine cannot do what was asked; the message says what is missing."""


class RankFailed(TestbedError):
    """A rank ended with an error or did not end at all."""

    exit_code = 3


class PeerLost(RankFailed):
    """This rank is well; `guilty` is the one that was lost, where it is known."""

    exit_code = 6

    def __init__(self, message: str, guilty: int | None = None) -> None:
        super().__init__(message)
        self.guilty = guilty


class ReplicasDiffer(TestbedError):
    """Parameters or their hashes differ between ranks that must agree."""

    exit_code = 4


class NetworkInvalid(TestbedError):
    """The network is not the one that was asked for."""

    exit_code = 5


class ProbeError(NetworkInvalid):
    """The probe of the network could not finish."""


class ChannelClosed(TestbedError):
    """The other end of a control connection is closed, or sent something that is no message."""


class Interrupted(TestbedError):
    """Stopped by the user; what was measured so far is on disk."""

    exit_code = 130


def refuse(what: str, value: object, rule: str, way_out: str) -> SpecError:
    """The one form of a refusal: what, its value, the rule, the way out."""
    return SpecError(f"{what} {shown(value)}: {rule}. {way_out}")


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Raise Unavailable where a package of this extra (pyproject.toml) is not installed; nothing is imported."""
    for package in packages:
        found = find_spec(package)
        if found is None or found.origin is None:  # no origin: a folder of that name, such as docker/ of a clone
            rule = f"needs the package {package} of the extra `{extra}`, which is not installed"
            raise Unavailable(f"{what}: {rule}. Install it with: pip install 'testbed[{extra}]'")


def shown(value: object) -> str:
    """A value as a message prints it: escaped, and not longer than a person reads."""
    return _cut(repr(value))


def plain(words: str) -> str:
    """Somebody else's words as a message prints them: one line, harmless, and not longer than a person reads."""
    return _cut(" ".join(harmless(words).split()))


def harmless(text: str) -> str:
    """What would command a terminal, or turn the order of its letters, becomes a question mark; lines stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def broken(error: OSError, where: object) -> TestbedError:
    """What the machine did to us (a full disk, a folder that vanished), as a sentence; `where`: if it names no file."""
    reason = error.strerror or str(error) or type(error).__name__
    way_out = "Make room, or mend that, and try again."
    return TestbedError(f"{error.filename or where}: {reason}, so nothing was finished. {way_out}")
