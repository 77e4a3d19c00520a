"""ScriptSpec: the user's training script, which runs unchanged on every node.

Its command line may contain placeholders, e.g. `python main.py --rank {rank}`. torchrun's variables (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) are always in its environment. Its folder is copied for every rank: `walk` yields what is
copied, and `check_tree` refuses a folder that is too large.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator

from testbed.spec.base import Spec, validator
from testbed.spec.errors import refuse
from testbed.spec.units import approximate_size, format_size, parse_size

PLACEHOLDERS = {
    "rank": "number of the node, from 0",
    "world": "number of nodes",
    "master": "address of node 0",
    "port": "port on node 0 that is free for the rendezvous",
    "address": "address of this node",
    "interface": "network interface of this node",
    "attach": "file that observes where PYTHONPATH is ignored: python -I {attach} main.py",
}
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
MAX_OUTPUT_BYTES = 64 << 20  # of a rank's log
# names in a script's folder that are not copied
NOT_COPIED = (".git", ".venv", "venv", "__pycache__", "runs", ".mypy_cache", ".pytest_cache")
# Limits of the files in the working copy that are kept after the run: those that the script has written.
MAX_COLLECTED_BYTES = 256 << 20
MAX_COLLECTED_FILES = 1000
MAX_DEPTH = 50  # folders above a file that is collected, and above a file of a submission
# paths that the container itself uses, so that no mount can have them
TAKEN = ("/", "/script", "/data", "/runs", "/tmp", "/opt/testbed", "/proc", "/dev", "/sys")
SCRIPT_DEADLINE_S = 300.0  # a script without a step for so long is ended
OWN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOME", "PATH")
# --instead MODE: the first step that the mode synchronises; in the steps before, the script's gradients are compared
SWAP_STEP = 4
SWAP_WARMUP_STEPS = SWAP_STEP + 2  # steps that do not count; in the last two, the mode's result is checked
INTERPRETERS = ("python", "python3", "torchrun", "fabric", "lightning", "accelerate")


def fill(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the words with every placeholder replaced; `{{` and `}}` become single braces.

    Raises UsageError for an unknown placeholder.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            way_out = f"Known: {known}. For literal braces write {{{match[0]}}}."
            raise refuse("placeholder", match[0], "is not known", way_out)
        return values[match[1]]

    return [_PLACEHOLDER.sub(replace, word) for word in argv]


def command_line(argv: Sequence[str]) -> str:
    """Return the command as it is typed in a shell. Placeholders are not quoted: a shell does not change `{rank}`."""

    def is_plain(word: str) -> bool:
        rest = _PLACEHOLDER.sub("x", word)
        return shlex.quote(rest) == rest

    return " ".join(word if is_plain(word) else shlex.quote(word) for word in argv)


def check_placeholders(argv: tuple[str, ...]) -> tuple[str, ...]:
    fill(argv, dict.fromkeys(PLACEHOLDERS, ""))
    return argv


def _check_inside(places: tuple[str, ...]) -> tuple[str, ...]:
    for place in places:
        if not place or PurePath(place).is_absolute() or ".." in PurePath(place).parts:
            rule = "must be a folder inside the script's own"
            way_out = "Write e.g. ./datasets. With download=True the script finds data at any path."
            raise refuse("place of the data", place, rule, way_out)
    return places


class Mount(Spec):
    """A folder or file on the machine of the Docker engine that is mounted into a script's container."""

    source: str  # absolute
    target: str  # absolute
    writable: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Parse HOST[:TARGET[:ro|rw]]; without a target both paths are the same. Raises UsageError."""
        source, *rest = text.split(":")
        target, access, *_ = *rest, "", ""
        path = str(Path(source).expanduser().absolute())
        way_out = "Write HOST[:TARGET[:ro|rw]], e.g. --mount ~/data:/data:ro."
        if not source or len(rest) > 2 or access not in ("", "ro", "rw"):
            raise refuse("--mount", text, "must be HOST[:TARGET[:ro|rw]]", way_out)
        if target and (not target.startswith("/") or os.path.normpath(target) in TAKEN):
            raise refuse("--mount", text, f"the target must be absolute, and not {', '.join(TAKEN)}", way_out)
        return cls(source=path, target=os.path.normpath(target) if target else path, writable=access == "rw")


def _check_address(address: str) -> str:
    try:
        usable = not address or ipaddress.IPv4Address(address).is_private
    except ValueError:
        usable = False
    if not usable or address.startswith("127."):
        rule = "must be a private IPv4 address that is no loopback"
        raise refuse("--address", address, rule, "Write the address that your script uses, e.g. --address 10.10.1.1.")
    return address


def node_address(first: str, node: int) -> str:
    """Return the address of a node if node 0 has `first`. Raises UsageError if the subnet (/24) has no such address."""
    found = ipaddress.IPv4Address(first) + node
    if found not in ipaddress.IPv4Interface(f"{first}/24").network or str(found).endswith((".0", ".255")):
        rule = f"node {node} would have {found}, which is no address of the same subnet"
        raise refuse("--address", first, rule, "Use fewer nodes, or a lower address.")
    return str(found)


def _check_variables(names: Any) -> Any:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise refuse("variable", name, "must be letters, digits and _", "Write e.g. --env DEBUG=1.")
        if name in OWN_VARIABLES or name.startswith("TESTBED_"):
            raise refuse("variable", name, "is set by the testbed", "Leave it out, or use a placeholder.")
    return names


def _python_file(words: Sequence[str]) -> str:
    """Return the script among the arguments of `python`; empty for -m and -c."""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        option = left.pop(0)
        if option.startswith(("-m", "-c")) or re.fullmatch(r"-[A-Za-z]*[mc]", option):
            return ""
        if option in ("-W", "-X") and left:
            left.pop(0)
    if left and left[0] == "{attach}":
        left.pop(0)
    return left[0] if left and left[0] != "-" else ""


Size = Annotated[
    int,
    BeforeValidator(validator(lambda value: parse_size(value) if isinstance(value, str) else value)),
    PlainSerializer(format_size),
    Field(gt=0),
]


class Limits(Spec):
    """What a script that is not trusted may use."""

    memory: Size = Field(default=2 << 30, examples=["2GiB"])  # of a node
    processes: int = Field(default=256, ge=16, le=100_000)  # of a node, with threads
    disk: Size = Field(default=256 << 20, examples=["256MiB"])  # that the script writes: /tmp of a node, the run folder
    seconds: float = Field(default=120.0, gt=0, le=86_400)  # from the start of the ranks to their end


class ScriptSpec(Spec):
    """A script as it is started on every node."""

    argv: tuple[str, ...] = Field(min_length=1, max_length=1000)  # with placeholders
    folder: str  # absolute; every rank gets a copy of it as its working folder
    path: str = ""  # PATH of the script; empty: PATH of the substrate's nodes
    environment: dict[str, str] = {}  # variables in addition to torchrun's and to a few of the caller
    image: str = ""  # of the script's containers; empty: the testbed's image
    mounts: tuple[Mount, ...] = ()  # in the script's containers
    data_at: tuple[str, ...] = ("data",)  # folders in the working folder where the script expects torchvision's data
    handed: tuple[str, ...] = ()  # names of the caller's variables that are passed on; their values are not recorded
    address: str = ""  # of node 0; the other nodes get the following addresses; empty: the substrate's own
    interface: str = Field(default="", pattern=r"^([a-z][a-z0-9_.-]{0,14})?$", description="at most 15 characters")
    exclude: tuple[str, ...] = ()  # names or patterns of files that are not copied, in addition to NOT_COPIED
    as_cpu: bool = False  # run a script that was written for CUDA on the CPU
    output: int = Field(default=MAX_OUTPUT_BYTES, gt=0)  # bytes of a rank's log; what exceeds it is dropped

    limits: Limits | None = None  # None: the script is trusted, and has only the limits of the substrate's nodes

    @field_validator("argv")
    @classmethod
    def _known_placeholders(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        return validator(check_placeholders)(argv)

    @field_validator("data_at")
    @classmethod
    def _inside(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        return validator(_check_inside)(places)

    @field_validator("address")
    @classmethod
    def _usable_address(cls, address: str) -> str:
        return validator(_check_address)(address)

    @field_validator("environment", "handed")
    @classmethod
    def _free_variables(cls, names: Any) -> Any:
        return validator(_check_variables)(names)

    @property
    def program(self) -> str:
        """The file with the training loop as written on the command line; empty if unknown, e.g. for `-m module`."""
        first = PurePath(self.argv[0]).name
        if re.fullmatch(r"python[\d.]*", first):
            return _python_file(self.argv[1:])
        return next((word for word in self.argv if word.endswith(".py") and not word.startswith("-")), "")

    @property
    def name(self) -> str:
        """The name of the script for tables: the first word that ends in .py, else the command."""
        words = [word for word in self.argv if word.endswith(".py")] or list(self.argv[:1])
        return PurePath(words[0]).name


MAX_COPY_BYTES = 2 << 30
MAX_COPY_FILES = 100_000
LARGEST = 3  # number of largest entries that a message names


def walk(source: Path, exclude: Sequence[str]) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield every entry below a folder with its relative path, a folder before its content. Follows no symlinks."""
    patterns = (*NOT_COPIED, *exclude)
    queue = [""]
    while queue:
        above = queue.pop()
        with os.scandir(source / above) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                relative = str(Path(above, entry.name))
                if any(fnmatch.fnmatch(entry.name, each) or fnmatch.fnmatch(relative, each) for each in patterns):
                    continue
                yield entry, relative
                if entry.is_dir(follow_symlinks=False):
                    queue.append(relative)


def check_tree(
    source: Path, exclude: Sequence[str] = (), max_bytes: int = MAX_COPY_BYTES, max_files: int = MAX_COPY_FILES
) -> None:
    """Raise UsageError if a folder is too large to be copied for every rank, or if an entry cannot be read."""
    sizes: dict[str, int] = {}
    files = 0
    try:
        for entry, relative in walk(source, exclude):
            if entry.is_file(follow_symlinks=False):
                files += 1
                top = relative.partition(os.sep)[0]
                sizes[top] = sizes.get(top, 0) + entry.stat(follow_symlinks=False).st_size
            if files > 10 * max_files:
                break  # e.g. a whole disk: the files so far are enough for the message
    except OSError as error:
        way_out = f"Change its mode, or leave it out: --exclude {Path(str(error.filename)).name}"
        raise refuse("folder", str(source), f"{error.filename}: {error.strerror}", way_out) from None
    total = sum(sizes.values())
    if total > max_bytes or files > max_files:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
        named = ", ".join(f"{name} {approximate_size(sizes[name])}" for name in largest)
        rule = f"at most {approximate_size(max_bytes)} in {max_files} files are copied for each rank"
        found = f"has {approximate_size(total)} in {files} files ({named})"
        way_out = f"Leave some out, e.g. --exclude {largest[0]}, or start in a smaller folder."
        raise refuse("folder", str(source), f"{found}, and {rule}", way_out)
