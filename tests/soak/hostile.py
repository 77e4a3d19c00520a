"""Files from strangers: experiments, inventories, run folders (to resume or to report), records, checkpoints.
Refused with a sentence, or run.

Everything happens in this process, with a place that starts nothing, under an audit hook: it sees every file that is
opened for writing and every program that is started. Memory and time are bounded: a file without end is a miss.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from testbed.control.cli import main
from testbed.results.conclude import summarise
from testbed.results.folder import RunFolder
from testbed.spec.errors import TestbedError
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec
from tests.soak import hostile_reports
from tests.soak.book import Outcome
from tests.soak.hostile_reports import KEPT, OUTSIDE
from tests.soak.nasty import LIVE, NASTY, mangle, place
from tests.soak.runs import drop, scratch
from tests.support.provenance import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # where pytest finds it, too

MILD: list[Any] = [
    1,
    2,
    3,
    4,
    8,
    0.5,
    "ring",
    "tree",
    "lenet5",
    "float64",
    "10mbit",
    "cubic",
    "x",
    False,
    [4, 4],
    "step",
]
KEYS = [
    "experiment",
    "name",
    "mode",
    "nodes",
    "model",
    "dtype",
    "batch",
    "steps",
    "epochs",
    "warmup",
    "seed",
    "threads",
]
KEYS += [
    "data.name",
    "data.subset",
    "data.shares",
    "optimizer.lr",
    "optimizer.schedule",
    "node.cpus",
    "node.congestion",
]
KEYS += ["link.rate", "link.delay", "link.loss", "overrides.node0.cpus", "overrides.../x.cpus", "deadline", "port"]
KEYS += ["faults", "checkpoint", "retries", "start_deadline", "__class__", "schema", "unknown", "probe", "accumulate"]
BASE = {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": 4, "probe": False}


CHANGES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.rename": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.symlink": 2,
}
PATIENCE = 60.0  # seconds for one file
MEMORY = 1 << 30  # bytes more than before


class Offence(BaseException):
    """Nobody catches it by mistake."""


class Guard:
    """What was started, and what was opened for writing or changed outside of `inside`, while it is armed."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.offences: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """What an audit hook raises ends the call before it is made: an offence is seen and does no harm."""
        before = len(self.offences)
        self._judge(event, arguments)
        if len(self.offences) > before:
            raise Offence(self.offences[-1])

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"):
            self.offences.append(f"{event} {arguments[0]!r}"[:200])
        if event == "pickle.find_class":
            self.offences.append(event)
        if event == "open" and isinstance(arguments[0], str | bytes) and isinstance(arguments[2], int):
            path = Path(os.fsdecode(arguments[0])).absolute()
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and self.inside not in path.resolve().parents and path != Path(os.devnull):
                self.offences.append(f"open {path}"[:200])
        if event in CHANGES:
            names = [name for name in arguments[: CHANGES[event]] if isinstance(name, str | bytes)]
            paths = [Path(os.fsdecode(name)).absolute() for name in names]
            paths = [path for path in paths if event != "os.mkdir" or not path.is_dir()]  # there: it makes nothing
            outside = [path for path in paths if self.inside not in (path.parent.resolve() / path.name).parents]
            self.offences += [f"{event} {path}"[:200] for path in outside]

    @contextlib.contextmanager
    def armed(self, inside: Path) -> Iterator[None]:
        self.inside, self.offences = inside.resolve(), []
        try:
            yield
        finally:
            self.inside = None


GUARD = Guard()


def hostile(count: int = 500) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for seed, kind in zip(range(count), itertools.cycle(KINDS), strict=False):
        yield f"{seed} {kind}", lambda s=seed, k=kind: _try(k, s)


def _try(kind: str, seed: int) -> Outcome:
    """Refused in one sentence, or done; anything else is a miss."""
    top, before = scratch(), Path.cwd()
    folder, outside = top / "inside", top / OUTSIDE
    folder.mkdir()
    outside.mkdir()
    (outside / KEPT).write_text(KEPT)
    patch = pytest.MonkeyPatch()
    said = io.StringIO()
    try:
        os.chdir(folder)
        patch.setenv("TESTBED_RUNS", str(folder / "runs"))
        use = KINDS[kind](folder, random.Random(f"hostile {seed}"))
        with GUARD.armed(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _bounded():
            how = _outcome(use)
        known = (folder, outside, outside / KEPT)
        stray = [path.name for path in (*top.iterdir(), *outside.iterdir()) if path not in known]
        stray += [] if (outside / KEPT).read_text() == KEPT else [KEPT]
        loose = _loose(folder, said.getvalue() + how[1])
        ok = how[0] in ("refused", "done") and not GUARD.offences and not stray and not loose
        why = {"why": how[1][:500], "offences": GUARD.offences[:9], "stray": stray, "loose": loose}
        return {"ok": ok, "how": how[0]} | ({} if ok else why)
    finally:
        patch.undo()
        os.chdir(before)
        drop(top)


def _loose(folder: Path, said: str) -> list[str]:
    """Strangers' words that somebody would obey: a browser those of a drawing or page, a terminal what was printed."""
    drawn = [path for path in folder.rglob("*") if path.suffix in (".html", ".svg") and path.is_file()]
    found = [path.name for path in drawn if LIVE in path.read_text(encoding="utf-8")]
    letters = sorted({letter for letter in said if not letter.isprintable() and letter not in "\n\t"})
    return found + ([f"printed {letters!r}"] if letters else [])


class Endless(BaseException):
    """A file took too long; nobody catches it by mistake."""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """So much memory and time for one file, and no more."""

    def stop(*_: object) -> None:
        raise Endless(f"not done after {PATIENCE:g} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _outcome(use: Callable[[], object]) -> tuple[str, str]:
    try:
        use()
    except TestbedError as error:
        words = str(error)
        return ("refused", words) if words.strip() else ("refused without a word", "")
    except typer.Exit as end:
        return "done", str(end.exit_code)
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "done", ""


# --- the files ---------------------------------------------------------------------------------------------------


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value if value is not None else "none")


def _values(rng: random.Random) -> dict[str, Any]:
    among = rng.choice((NASTY, MILD))
    return {rng.choice(KEYS): rng.choice(among) for _ in range(rng.randrange(1, 4))}


def _command(*argv: str) -> object:
    """A command line whose substrate `fake` has ranks that end well."""
    from tests.support.fake_substrate import FakeRuns

    return main.app(list(argv), standalone_mode=False, obj={"fake": FakeRuns().type})


def _experiment(folder: Path, rng: random.Random) -> Callable[[], object]:
    """A sweep whose keys, axes or bytes are bad."""
    lines = [f"title = {_toml(rng.choice(['a', *map(str, NASTY)]))}", "[base]"]
    lines += [f"{_key(key)} = {_toml(value)}" for key, value in (BASE | _values(rng)).items()]
    if rng.random() < 0.4:
        lines += ["[axes]", f"{_key(rng.choice(KEYS))} = {_toml(rng.choice([['ring', 'tree'], NASTY, [1] * 300, []]))}"]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = folder / rng.choice(("x.toml", "x y.toml", "-x.toml", "x;y.toml", ".toml"))
    place(path, mangle(data, rng) if rng.random() < 0.5 else data, rng)
    quiet = rng.choice(([], ["--json"]))
    return lambda: _command("sweep", "--on", "fake", *quiet, "--", str(path))


def _key(key: str) -> str:
    return ".".join(json.dumps(part) for part in key.split("."))


def _flags(folder: Path, rng: random.Random) -> Callable[[], object]:
    """`testbed run` with bad settings."""
    settings = [word for key, value in _values(rng).items() for word in ("--set", f"{key}={_toml(value)}"[:50_000])]
    settings = [word.replace("\0", "") for word in settings]
    small = ["--model", "lenet5", "--data", "synthetic", "--batch", "8", "--steps", "4", "--set", "probe=false"]
    return lambda: _command("run", *small, "--nodes", "2", "--on", "fake", "--json", *settings)


def _inventory(folder: Path, rng: random.Random) -> Callable[[], object]:
    node = {"name": "a", "address": "10.0.0.1", rng.choice(["name", "address", "user", "key", "port", "jump", "x"]): 0}
    node |= {key: rng.choice(NASTY) for key in node if rng.random() < 0.5}
    data = "\n".join(["[[nodes]]", *(f"{key} = {_toml(value)}" for key, value in node.items())]).encode()
    place(folder / "hosts.toml", mangle(data, rng) if rng.random() < 0.5 else data, rng)
    return lambda: Inventory.read(folder / "hosts.toml")


def _run_folder(folder: Path, rng: random.Random) -> Callable[[], object]:
    """Somebody's unfinished run, to be resumed: bad spec, bad summary, links out of it."""
    run = folder / "given"
    run.mkdir()
    spec = json.loads(RunSpec.load(BASE, "soak").to_json())
    if rng.random() < 0.6:
        spec |= {key: value for key, value in _values(rng).items() if "." not in key}
    data = json.dumps(spec).encode("utf-8", "surrogatepass")
    place(run / "spec.json", mangle(data, rng) if rng.random() < 0.4 else data, rng)
    if rng.random() < 0.5:
        name = rng.choice(["rank0.jsonl", "rank1.log", "faults.jsonl", "checkpoints", "summary.json", "receipt.json"])
        target = rng.choice([str(folder.parent / OUTSIDE / KEPT), "../../stray", str(folder.parent / "stray")])
        (run / name).symlink_to(target)
    else:
        (run / "summary.json").write_bytes(rng.randbytes(rng.randrange(400)))
    return lambda: _command("run", "--resume", str(run), "--on", "fake", "--json")


def _records(folder: Path, rng: random.Random) -> Callable[[], object]:
    """A finished run's records, to be summed up."""
    spec = RunSpec.load(BASE, "soak")
    run = RunFolder(folder / "given")
    run.create(spec)
    good = {"kind": "step", "step": 3, "epoch": 0, "total": 1.0, "loss": 2.0, "sent": 1, "received": 1, "images": 4}
    for rank in range(2):
        rows = [good | {rng.choice(list(good)): rng.choice(NASTY)} for _ in range(4)]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")
        place(run.records(rank), mangle(data, rng) if rng.random() < 0.5 else data, rng, links=False)
    return lambda: summarise(run, spec, status="ok")


def _checkpoint(folder: Path, rng: random.Random) -> Callable[[], object]:
    """Bytes that say they are a checkpoint, with or without a fitting checksum."""
    import hashlib

    from tests.soak.torn import Trained, keeper

    trained, keeps = Trained(), keeper(folder / "c")
    keeps.write(trained, 1)
    tensors, facts = folder / "c" / "rank0-step1.safetensors", folder / "c" / "rank0-step1.json"
    if rng.random() < 0.6:
        head = tensors.read_bytes()[: rng.choice((8, 200, 2000))]
        tensors.write_bytes(mangle(head, rng) + rng.randbytes(100))
    if rng.random() < 0.7:
        told = json.loads(facts.read_text()) | {"sha256": hashlib.sha256(tensors.read_bytes()).hexdigest()}
        told |= {rng.choice(list(told)): rng.choice(NASTY)} if rng.random() < 0.5 else {}
        facts.write_text(json.dumps(told))
    else:
        facts.write_bytes(mangle(facts.read_bytes()[:3000], rng))
    if rng.random() < 0.1:
        tensors.unlink()
        tensors.symlink_to(folder.parent / OUTSIDE / KEPT)
    return lambda: (keeps.agree(trained), keeps.load(trained, 1))


KINDS: dict[str, Callable[[Path, random.Random], Callable[[], object]]] = {
    "experiment": _experiment,
    "flags": _flags,
    "inventory": _inventory,
    "run folder": _run_folder,
    "records": _records,
    "checkpoint": _checkpoint,
    "report": hostile_reports.report,
    "compare": hostile_reports.compare,
    "trace": hostile_reports.trace,
}
