"""Malicious input: experiments, flags, inventories, run folders, records, checkpoints and finished runs of other users.

Each must be refused with a sentence, or work. Everything happens in this process on a fake substrate that starts no
rank, under an audit hook for every file opened for writing and every program started. Memory and time are limited:
reading an endless file is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from testbed.control.cli import main
from testbed.results.conclude import summarise
from testbed.results.folder import EXPERIMENT, RunFolder, write_whole
from testbed.spec.errors import TestbedError
from testbed.spec.experiment import Experiment
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec
from tests.soak.outcomes import Cases, Outcome
from tests.soak.runs import make_scratch, remove
from tests.support.fake_substrate import GOOD, FakeRuns, succeeds

TIMEOUT_S = 60.0  # for one case
MAX_MEMORY_BYTES = 1 << 30  # beyond what the process has when the case begins
OUTSIDE = "outside"  # a folder beside the malicious files; nothing may be created in it
KEPT = "kept"  # a file in it that must not change; never a real file of the machine, because this runs as root

Use = Callable[[], object]  # uses the malicious input


# --- malicious values and bytes --------------------------------------------------------------------------------------

SCRIPT = "<script>alert(1)"  # must not appear unescaped in a page
OCTAL_SCRIPT = r"\042\076\074script\076alert(1)\074/script\076"  # the same in octal, after a quote: escapes a template
TERMINAL_CODES = "\x1b]0;owned\x07\x1b[31m"  # change a terminal's title and colour

MALICIOUS: list[Any] = [
    *("../../escape", "/etc/passwd", "..", ".", "", "a/../../b", "~root/x", "name\n../x", "\0", "x" * 100_000),
    *("$(touch stray)", "`touch stray`", "; touch stray", "| sh", "&& touch stray", "-rf", "--help", "%s%n", "{{7*7}}"),
    *(f"{SCRIPT}</script>", OCTAL_SCRIPT, r"\q", r"$\x$", TERMINAL_CODES, "\u202egnp.exe", "é" * 70),
    *("\x1b[31m", "NaN", "nan", "inf", "1e309", "0x10", "007"),
    *(-1, 0, 2**31, 2**63, 10**30, -0.0, 1e308, True, None, [], {}, [[]], [{}], {"a": {"b": 1}}, [None] * 2000),
    *("ring/" * 50, "ring/bucket:0", "ring/bucket:9" + "9" * 40 + "GiB", "ddp/flat/overlap", "kill:rank0@step1"),
    *(["kill:rank99@step1"], ["pause:rank1@step1+" + "9" * 99 + "s"], ["cut:" * 100]),
    *([1, 2], ["kill:rank?@step?"] * 99),
]
VALID: list[Any] = [1, 2, 3, 4, 8, 0.5, "ring", "tree", "lenet5", "float64", "10mbit", "cubic", "x", False, [4, 4]]
VALID += ["step"]
KEYS = ["experiment", "name", "mode", "nodes", "model", "dtype", "batch", "steps", "epochs", "warmup", "seed"]
KEYS += ["threads", "data.name", "data.subset", "data.shares", "optimizer.lr", "optimizer.schedule", "node.cpus"]
KEYS += ["node.congestion", "link.rate", "link.delay", "link.loss", "overrides.node0.cpus", "overrides.../x.cpus"]
KEYS += ["deadline", "port", "faults", "checkpoint", "retries", "start_deadline", "__class__", "schema", "unknown"]
KEYS += ["probe", "accumulate"]
BASE = {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": 4, "probe": False}


def _values(rng: random.Random) -> dict[str, Any]:
    among = rng.choice((MALICIOUS, VALID))
    return {rng.choice(KEYS): rng.choice(among) for _ in range(rng.randrange(1, 4))}


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Change, cut, repeat or insert bytes a few times."""
    for _ in range(rng.randrange(1, 12)):
        at = rng.randrange(len(data) + 1)
        data = rng.choice(
            (
                data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at + 1 :],
                data[:at],
                data[:at] + data[at // 2 : at] * 2 + data[at:],
                data[:at] + rng.choice((b"[", b"{", b'"', b"\0", b"\xff", b"=", b"9" * 5000, b"[" * 3000)) + data[at:],
            )
        )
    return data


def put(path: Path, data: bytes, rng: random.Random, links: bool = True) -> None:
    """Write a file; sometimes create a folder, a named pipe, a symlink or a huge file instead."""
    odd = rng.random() if links else 1.0
    if odd < 0.03:
        path.mkdir()
    elif odd < 0.06:
        os.mkfifo(path)
    elif odd < 0.09:
        path.symlink_to("/dev/zero")
    elif odd < 0.12:
        path.write_bytes(data)
        os.truncate(path, 3 << 30)
    else:
        path.write_bytes(data)


# --- one case --------------------------------------------------------------------------------------------------------


def hostile(count: int = 500) -> Cases:
    for seed, kind in zip(range(count), itertools.cycle(KINDS), strict=False):
        yield f"{seed} {kind}", partial(_try, kind, seed)


def _try(kind: str, seed: int) -> Outcome:
    """The input must be refused with a sentence or work. Anything else is a miss."""
    top, before = make_scratch(), Path.cwd()
    folder, outside = top / "inside", top / OUTSIDE
    folder.mkdir()
    outside.mkdir()
    (outside / KEPT).write_text(KEPT)
    patch = pytest.MonkeyPatch()
    printed = io.StringIO()
    try:
        os.chdir(folder)
        patch.setenv("TESTBED_RUNS", str(folder / "runs"))
        use = KINDS[kind](folder, random.Random(f"hostile {seed}"))
        with GUARD.armed(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _limited():
            how, why = _use(use)
        known = (folder, outside, outside / KEPT)
        stray = [path.name for path in (*top.iterdir(), *outside.iterdir()) if path not in known]
        stray += [] if (outside / KEPT).read_text() == KEPT else [KEPT]
        loose = _unescaped(folder, printed.getvalue() + why)
        ok = how in ("refused", "done") and not GUARD.offences and not stray and not loose
        explained = {"why": why[:500], "offences": GUARD.offences[:9], "stray": stray, "loose": loose}
        return {"ok": ok, "how": how} | ({} if ok else explained)
    finally:
        patch.undo()
        os.chdir(before)
        remove(top)


def _use(use: Use) -> tuple[str, str]:
    """Return how it ended, and the message."""
    try:
        use()
    except TestbedError as error:
        message = str(error)
        return ("refused", message) if message.strip() else ("refused without a message", "")
    except typer.Exit as end:
        return "done", str(end.exit_code)
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "done", ""


def _unescaped(folder: Path, printed: str) -> list[str]:
    """Return the pages and drawings with a live script, and the control characters that reached the terminal."""
    drawn = [path for path in folder.rglob("*") if path.suffix in (".html", ".svg") and path.is_file()]
    found = [path.name for path in drawn if SCRIPT in path.read_text(encoding="utf-8")]
    characters = sorted({each for each in printed if not each.isprintable() and each not in "\n\t"})
    return found + ([f"printed {characters!r}"] if characters else [])


class Offence(BaseException):
    """Raised by the audit hook. Not an Exception, so that no handler catches it by mistake."""


class TooSlow(BaseException):
    """A case took too long. Not an Exception, so that no handler catches it by mistake."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Limit memory and time."""

    def stop(*_: object) -> None:
        raise TooSlow(f"not done after {TIMEOUT_S:g} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# Audit events that start a program, and those that change paths, with the number of their path arguments.
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1, "os.rename": 2}
CHANGES |= {"os.symlink": 2}


class Guard:
    """An audit hook. While armed, it stops every start of a program and every change of a file outside one folder."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.offences: list[str] = []
        self._installed = False

    @contextlib.contextmanager
    def armed(self, inside: Path) -> Iterator[None]:
        if not self._installed:  # a hook cannot be removed, so it is added only in processes that need it
            sys.addaudithook(self._hook)
            self._installed = True
        self.inside, self.offences = inside.resolve(), []
        try:
            yield
        finally:
            self.inside = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An exception raised here prevents the call, so an offence is recorded and does no harm."""
        if self.inside is None:
            return
        found = list(self._offences(event, arguments, self.inside))
        self.offences += found
        if found:
            raise Offence(found[-1])

    @staticmethod
    def _offences(event: str, arguments: tuple[Any, ...], inside: Path) -> Iterator[str]:
        if event in STARTS:
            yield f"{event} {arguments[0]!r}"[:200]
        if event == "pickle.find_class":
            yield event
        if event == "open" and isinstance(arguments[0], str | bytes) and isinstance(arguments[2], int):
            path = Path(os.fsdecode(arguments[0])).absolute()
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and inside not in path.resolve().parents and path != Path(os.devnull):
                yield f"open {path}"[:200]
        if event in CHANGES:
            names = [name for name in arguments[: CHANGES[event]] if isinstance(name, str | bytes)]
            paths = [Path(os.fsdecode(name)).absolute() for name in names]
            paths = [path for path in paths if event != "os.mkdir" or not path.is_dir()]  # mkdir of a folder fails
            outside = [path for path in paths if inside not in (path.parent.resolve() / path.name).parents]
            yield from (f"{event} {path}"[:200] for path in outside)


GUARD = Guard()


# --- kinds of input: each prepares files in a folder and returns a function that uses them ---------------------------


def _command(*words: str) -> Use:
    """The `testbed` command with the fake substrate."""
    return lambda: main.app([*words], standalone_mode=False, obj={"fake": FakeRuns().type})


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value if value is not None else "none")


def _toml_key(key: str) -> str:
    return ".".join(json.dumps(part) for part in key.split("."))


def _experiment(folder: Path, rng: random.Random) -> Use:
    """`testbed sweep` of a file whose keys, axes or bytes are bad."""
    lines = [f"title = {_toml(rng.choice(['a', *map(str, MALICIOUS)]))}", "[base]"]
    lines += [f"{_toml_key(key)} = {_toml(value)}" for key, value in (BASE | _values(rng)).items()]
    if rng.random() < 0.4:
        axis, values = rng.choice(KEYS), rng.choice([["ring", "tree"], MALICIOUS, [1] * 300, []])
        lines += ["[axes]", f"{_toml_key(axis)} = {_toml(values)}"]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = folder / rng.choice(("x.toml", "x y.toml", "-x.toml", "x;y.toml", ".toml"))
    put(path, mangle(data, rng) if rng.random() < 0.5 else data, rng)
    return _command("sweep", "--on", "fake", *rng.choice(([], ["--json"])), "--", str(path))


def _flags(folder: Path, rng: random.Random) -> Use:
    """`testbed run` with bad settings."""
    settings = [word for key, value in _values(rng).items() for word in ("--set", f"{key}={_toml(value)}"[:50_000])]
    settings = [word.replace("\0", "") for word in settings]
    small = ["--model", "lenet5", "--data", "synthetic", "--batch", "8", "--steps", "4", "--set", "probe=false"]
    return _command("run", *small, "--nodes", "2", "--on", "fake", "--json", *settings)


def _inventory(folder: Path, rng: random.Random) -> Use:
    node = {"name": "a", "address": "10.0.0.1", rng.choice(["name", "address", "user", "key", "port", "jump", "x"]): 0}
    node |= {key: rng.choice(MALICIOUS) for key in node if rng.random() < 0.5}
    data = "\n".join(["[[nodes]]", *(f"{key} = {_toml(value)}" for key, value in node.items())]).encode()
    put(folder / "hosts.toml", mangle(data, rng) if rng.random() < 0.5 else data, rng)
    return lambda: Inventory.read(folder / "hosts.toml")


def _run_folder(folder: Path, rng: random.Random) -> Use:
    """`testbed run --resume` of an unfinished run: a bad spec, a bad summary, symlinks to files outside."""
    run = folder / "given"
    run.mkdir()
    spec = json.loads(RunSpec.load(BASE, "soak").to_json())
    if rng.random() < 0.6:
        spec |= {key: value for key, value in _values(rng).items() if "." not in key}
    data = json.dumps(spec).encode("utf-8", "surrogatepass")
    put(run / "spec.json", mangle(data, rng) if rng.random() < 0.4 else data, rng)
    if rng.random() < 0.5:
        name = rng.choice(["rank0.jsonl", "rank1.log", "faults.jsonl", "checkpoints", "summary.json", "receipt.json"])
        target = rng.choice([str(folder.parent / OUTSIDE / KEPT), "../../stray", str(folder.parent / "stray")])
        (run / name).symlink_to(target)
    else:
        (run / "summary.json").write_bytes(rng.randbytes(rng.randrange(400)))
    return _command("run", "--resume", str(run), "--on", "fake", "--json")


def _records(folder: Path, rng: random.Random) -> Use:
    """The summary of a run from its ranks' records."""
    spec = RunSpec.load(BASE, "soak")
    run = RunFolder(folder / "given")
    run.create(spec)
    good = {"kind": "step", "step": 3, "epoch": 0, "total": 1.0, "loss": 2.0, "sent": 1, "received": 1, "images": 4}
    for rank in range(2):
        rows = [good | {rng.choice(list(good)): rng.choice(MALICIOUS)} for _ in range(4)]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")
        put(run.records(rank), mangle(data, rng) if rng.random() < 0.5 else data, rng, links=False)
    return lambda: summarise(run, spec, status="ok")


def _checkpoint(folder: Path, rng: random.Random) -> Use:
    """A damaged checkpoint, with or without a correct checksum."""
    from tests.soak.torn import TrainerStub, open_checkpoints  # imports torch

    trainer, checkpoints = TrainerStub(), open_checkpoints(folder / "c")
    checkpoints.write(trainer, 1)
    tensors, facts = folder / "c" / "rank0-step1.safetensors", folder / "c" / "rank0-step1.json"
    if rng.random() < 0.6:
        head = tensors.read_bytes()[: rng.choice((8, 200, 2000))]
        tensors.write_bytes(mangle(head, rng) + rng.randbytes(100))
    if rng.random() < 0.7:
        changed = json.loads(facts.read_text()) | {"sha256": hashlib.sha256(tensors.read_bytes()).hexdigest()}
        changed |= {rng.choice(list(changed)): rng.choice(MALICIOUS)} if rng.random() < 0.5 else {}
        facts.write_text(json.dumps(changed))
    else:
        facts.write_bytes(mangle(facts.read_bytes()[:3000], rng))
    if rng.random() < 0.1:
        tensors.unlink()
        tensors.symlink_to(folder.parent / OUTSIDE / KEPT)

    def load() -> None:
        checkpoints.agree(trainer)
        checkpoints.load(trainer, 1)

    return load


# --- finished runs of other users: every file may be falsified, symlinks may lead outside ----------------------------

STEPS = 4
FAULT = "pause:rank1@step2+1s"
PLOT = "given-timeline"  # the first part of the name of one of the report's files


def _report(folder: Path, rng: random.Random) -> Use:
    """`testbed report` of a run, or of the folder that contains it."""
    run = _falsified_run(folder / "given", rng)
    named = rng.choice((run.path, run.path.parent))
    return _command("report", str(named), *rng.choice(([], ["--json"])))


def _compare(folder: Path, rng: random.Random) -> Use:
    """`testbed compare` with a good run, in either order."""
    sides = [str(_finished_run(folder / "good").path), str(_falsified_run(folder / "given", rng).path)]
    return _command("compare", *rng.sample(sides, 2), *rng.choice(([], ["--json"])))


def _trace(folder: Path, rng: random.Random) -> Use:
    return _command("trace", str(_falsified_run(folder / "given", rng).path))


def _finished_run(folder: Path) -> RunFolder:
    """Create a run as a sweep leaves it: with a fault that it survived, a profile, and the experiment beside it."""
    base = {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": STEPS, "warmup": 0}
    values = base | {"faults": [FAULT], "experiment": "given", "name": "ring"}
    spec = RunSpec.load(values, "soak")
    run = RunFolder(folder / "ring")
    run.create(spec)
    for rank in range(spec.world):
        succeeds(run, rank)
        run.profile(rank).write_text(json.dumps({"forward": 0.2, "backward": 0.5, "sync": 0.3}))
    GOOD.write(run.receipt)
    events = [{"event": "injected", "at": 1.0, "begun": 1.0, "fault": FAULT, "rank": 1, "step": 2}]
    events += [{"event": "over", "at": 2.0, "fault": FAULT, "rank": 1}]
    events += [{"event": "ended", "at": 3.0, "rank": rank, "code": 0} for rank in range(spec.world)]
    run.faults.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_whole(run.summary, summarise(run, spec, status="ok", substrate="netns").model_dump_json(by_alias=True))
    (folder / EXPERIMENT).write_text(Experiment(name="given", title="Which?", base=base).model_dump_json())
    return run


def _falsified_run(folder: Path, rng: random.Random) -> RunFolder:
    """A finished run with up to three falsified files and sometimes a symlink."""
    run = _finished_run(folder)
    files = [run.spec, run.summary, run.receipt, run.faults, run.records(0), run.records(1), run.profile(0)]
    for path in rng.sample([*files, folder / EXPERIMENT], rng.randrange(0, 4)):
        data = path.read_bytes()
        falsified = _falsify(data, rng) if rng.random() < 0.6 else mangle(data, rng)
        path.unlink()
        put(path, falsified, rng)
    if rng.random() < 0.4:
        _link_outside(run, rng)
    return run


def _falsify(data: bytes, rng: random.Random) -> bytes:
    """Replace one value of a JSON file or of one of its lines."""
    lines = [data] if data.startswith(b"{\n") else data.splitlines()
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    _replace_value(value, rng)
    lines[at] = json.dumps(value).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def _replace_value(value: Any, rng: random.Random) -> None:
    """Replace one value at any depth."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    deeper = isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7
    if deeper:
        _replace_value(value[key], rng)
    else:
        value[key] = rng.choice(MALICIOUS)


def _link_outside(run: RunFolder, rng: random.Random) -> None:
    """Plant a symlink to the outside where something is read or written."""
    outside = run.path.parents[2] / OUTSIDE
    above = run.path.parent
    spots = [above / "report", above / "report.html", run.path / "trace.json", run.path / "report"]
    spots += [above / "report" / name for name in ("report.md", "report.json", f"{PLOT}.svg", f"{PLOT}.png")]
    spots += [run.summary, run.receipt, run.faults, run.records(0), run.profile(1), run.spec, above / EXPERIMENT]
    spots += [run.path / "rank0.attempt1.jsonl", above / "another"]
    spot = rng.choice(spots)
    spot.parent.mkdir(exist_ok=True)
    spot.unlink(missing_ok=True)
    spot.symlink_to(rng.choice((outside, outside / "stray", outside / KEPT, Path("/dev/zero"))))


KINDS: dict[str, Callable[[Path, random.Random], Use]] = {
    "experiment": _experiment,
    "flags": _flags,
    "inventory": _inventory,
    "run folder": _run_folder,
    "records": _records,
    "checkpoint": _checkpoint,
    "report": _report,
    "compare": _compare,
    "trace": _trace,
}
