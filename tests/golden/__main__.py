"""What the product does, seen from outside, recorded once and compared later.

    python -m tests.golden replay [PART...]        compare with tests/golden/recorded/; exit code 1 on a difference
    python -m tests.golden record [PART...]        write tests/golden/recorded/ anew, where a difference is intended
    python -m tests.golden hashes --old WORKTREE   train every exact mode here and there, compare final parameters

`--tree WORKTREE` drives the code of another worktree. Parts: help, refusals, arguments, folders (needs root for netns),
compose (needs an engine), ids, coverage (minutes, only when named).
renames.txt (`old -> new`, or `PART: old -> new`) is applied to the recorded side first.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.golden.bad_inputs import CASES, Bad

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded"
SYNTHETIC = ["--model", "lenet5", "--data", "synthetic", "--nodes", "2", "--batch", "16", "--steps", "3"]
MODES = ("ring", "ddp", "single")
TIMEOUT_S = 300
LOAD = r"stragglers\[\]|-ranks-\d"  # what a report finds on a busy machine only
COVERAGE_TOLERANCE = 0.5  # percentage points; which branch a timing-dependent test takes differs from run to run


class Tree:
    """A worktree whose code is driven."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        own = self.path / ".venv" / "bin" / "python"
        self.python = str(own if own.exists() else sys.executable)

    def argv(self, command: str) -> list[str]:
        """The command as a user of this worktree would type it."""
        first, *words = shlex.split(command)
        programs = {
            "testbed": ["-m", "testbed.control"],
            "fab": ["-m", "fabric", "--search-root", str(self.path)],
            "rank": ["-m", "testbed.rank"],
            "entrypoint": [str(self.path / "docker" / "entrypoint.py")],
            "render": [str(self.path / "docker" / "render.py")],
            "python": [],
        }
        return [self.python, *programs[first], *words] if first in programs else [first, *words]

    def run(
        self, command: str | list[str], cwd: Path, env: Mapping[str, str] = {}, timeout: float = TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        argv = self.argv(command) if isinstance(command, str) else command
        dropped = ("TESTBED_", "COLUMNS", "RANK", "WORLD_SIZE", "MASTER_", "GLOO_", "PYTHONPATH", "CI")
        base = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        base |= {"PYTHONPATH": str(self.path), "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TESTBED_SHARE": "1"}
        return subprocess.run(
            argv, cwd=cwd, env=base | dict(env), capture_output=True, text=True, timeout=timeout, errors="replace"
        )

    def plain(self, text: str, tmp: Path) -> str:
        """Without what differs from machine to machine and from second to second."""
        text = text.replace(self.python, "PYTHON").replace(str(tmp), "TMP").replace(str(self.path), "TREE")
        text = re.sub(r"slowest [\d.]+ .bit/s \([^)]*\)", "slowest RATE (LINK)", text)
        text = re.sub(r"\d{8}-\d{6}", "TIME", text)
        return re.sub(r"\b\d+-\d+-[0-9a-f]{16}\b", "OWNER", text)


def commands_of(text: str) -> list[str]:
    """The names under `Commands:` of a help text."""
    _, _, after = text.partition("\nCommands:\n")
    return re.findall(r"^  ([a-z][a-z-]*)", after, re.MULTILINE)


def record_help(tree: Tree) -> Iterator[str]:
    """Help of every command and task, and the list of modes."""

    def section(command: str) -> str:
        done = tree.run(command, tree.path)
        said = tree.plain(done.stdout + done.stderr, tree.path).rstrip()
        if said.startswith("["):
            said = "\n".join(map(json.dumps, json.loads(said)))  # one row a line
        return f"## {command}\nexit {done.returncode}\n{said}\n"

    def below(command: str) -> Iterator[str]:
        text = section(f"{command} --help")
        yield text
        for name in commands_of(text):
            yield from below(f"{command} {name}")

    yield from below("testbed")
    for command in ("testbed modes", "testbed modes --json", "testbed version", "rank --help", "make help"):
        yield section(command)
    tasks = section("fab --list")
    yield tasks
    for task in re.findall(r"^  ([a-z]+) ", tasks, re.MULTILINE):
        yield section(f"fab --help {task}")


def record_refusals(tree: Tree) -> Iterator[str]:
    """Exit code and message of every bad input."""
    with ThreadPoolExecutor(3) as pool:
        yield from pool.map(lambda bad: refusal(tree, bad), CASES)


def refusal(tree: Tree, bad: Bad) -> str:
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        (tmp / "runs").mkdir()
        for path, text in bad.files.items():
            (tmp / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp / path).write_text(text)
        own = {key: value.replace("TMP", name) for key, value in bad.env.items()}
        env = {"HOME": name, "DOCKER_HOST": f"unix://{name}/no.sock", "TESTBED_RUNS": f"{name}/runs"} | own
        env |= {"TESTBED_DATA": f"{name}/data"}
        done = tree.run(bad.command, tmp, env)
        made = sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.is_file())
        left = [tree.plain(path, tmp) for path in made if path not in bad.files and not path.startswith(".")]
        said = tree.plain(done.stdout + done.stderr, tmp).rstrip()
    shown = [f"{key}={value}" for key, value in bad.env.items()] + [bad.command]
    files = [f"{path}: {text[:200]!r}" for path, text in bad.files.items()]
    return "\n".join(
        ["## " + " ".join(shown), *files, f"exit {done.returncode}", said, *(f"left {p}" for p in left), ""]
    )


def record_arguments(tree: Tree) -> Iterator[str]:
    """tc, Compose and SSH argument lists."""
    done = tree.run(["nice", tree.python, str(HERE / "arguments.py")], tree.path)
    if done.returncode:
        raise SystemExit(done.stderr)
    yield tree.plain(done.stdout, tree.path)
    yield f"## compose.yaml\n{(tree.path / 'compose.yaml').read_text()}"
    yield f"## render 3\n{tree.run('render 3', tree.path).stdout}"


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a JSON value, with the path to it; the items of a list are merged."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{prefix}.{key}"
            yield from keys(inner, f"{prefix}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{prefix}[]")


def left_in(folder: Path) -> set[str]:
    """One line per file, one per key of a JSON or JSONL file; ranks are merged, numbers of steps and times left out."""
    found = set()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"\d{8}-\d{6}", "TIME", str(path.relative_to(folder)))
        found.add(f"file {re.sub(r'step-?[0-9]+', 'stepK', name)}")
        merged = re.sub(r"rank\d+", "rankN", path.name)
        if path.suffix == ".json" and "trace" not in name:
            found |= {f"key {merged} {key}" for key in keys(json.loads(path.read_text()))}
        if path.suffix == ".jsonl":
            for record in map(json.loads, path.read_text().splitlines()):
                kind = record.get("kind", record.get("event", ""))
                found |= {f"key {merged} {kind}{key}" for key in keys(record)}
    return found


def by_fact(found: Mapping[str, set[str]]) -> str:
    """Every fact once, with the runs it holds for."""
    facts: dict[str, list[str]] = {}
    for run, lines in found.items():
        for line in lines:
            facts.setdefault(line, []).append(run)
    shown = {fact: "all" if len(runs) == len(found) else ", ".join(runs) for fact, runs in facts.items()}
    return "\n".join(sorted(f"{fact}  <- {runs}" for fact, runs in shown.items()))


def commands_run(folder: Path, log: Path) -> Path:
    """Programs that write their arguments to `log` and become the real ones; put the folder first in PATH."""
    folder.mkdir()
    for name in ("ip", "tc", "sysctl", "unshare", "docker", "setpriv"):
        real = shutil.which(name)
        if real:
            line = f"#!/bin/sh\nprintf '%s' {name} >>{log}.$$\nfor word; do printf ' %s' \"$word\" >>{log}.$$; done\n"
            end = f"echo >>{log}.$$; cat {log}.$$ >>{log}; rm {log}.$$\n"
            (folder / name).write_text(f'{line}{end}exec {real} "$@"\n')
            (folder / name).chmod(0o755)
    return folder


def one_run(tree: Tree, on: str, mode: str, *flags: str) -> set[str]:
    """What one `testbed run` leaves and prints as JSON, and which programs it called."""
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        path = f"{commands_run(tmp / 'bin', tmp / 'calls')}:{os.environ['PATH']}"
        words = ["run", "--on", on, "--mode", mode, *SYNTHETIC, *flags, "--json", "--out", "run"]
        done = tree.run(f"testbed {shlex.join(words)}", tmp, {"PATH": path})
        found = left_in(tmp / "run") | {f"exit {done.returncode}"}
        if done.stdout.startswith("{"):
            found |= {f"key stdout {key}" for key in keys(json.loads(done.stdout))}
        said = re.sub(r"step \d+", "step K", tree.plain(done.stderr, tmp))
        calls = (tmp / "calls").read_text().splitlines() if (tmp / "calls").exists() else []
        return (
            found | {f"printed {line}" for line in said.splitlines()} | {call(tree.plain(line, tmp)) for line in calls}
        )


def call(line: str) -> str:
    """A command line without ports, container numbers and the like."""
    line = re.sub(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{12}\b", "ID", line)
    line = re.sub(r"/tmp/[^ ]*", "/tmp/X", line)
    return "call " + re.sub(r"(PORT=|pid-|:|--port )(?!29500)\d{4,}", r"\1NUMBER", line)


def record_folders(tree: Tree) -> Iterator[str]:
    """Files and keys that runs on processes and in namespaces leave, a sweep and the commands that read it."""
    if os.geteuid() != 0:
        raise NotHere("network namespaces need root")
    found = {}
    for mode in MODES:
        found[f"process {mode}"] = one_run(tree, "process", mode)
        found[f"netns {mode}"] = one_run(tree, "netns", mode, "--rate", "100mbit")
    found["process pipeline"] = one_run(tree, "process", "ring/bucket:64KiB/pipeline")
    found["process killed"] = one_run(tree, "process", "ring", "--fault", "kill:rank1@step1", "--steps", "60")
    again = ["--fault", "exit:rank1@step20", "--retries", "1", "--set", "checkpoint=5", "--steps", "60"]
    found["process retried"] = one_run(tree, "process", "ring", *again)
    yield f"{by_fact(found)}\n{by_fact({'sweep': sweep(tree), 'a run': set()})}"


def sweep(tree: Tree) -> set[str]:
    """A sweep of two modes, then report, compare, trace and doctor on it."""
    base = "[base]\nmodel='lenet5'\nnodes=2\nbatch=16\nsteps=6\nspans=true\ndata={name='synthetic', test_subset=64}\n"
    found = set()
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        (tmp / "two.toml").write_text(f"title='Two?'\n{base}[axes]\nmode=['ring', 'none']\n")
        commands = ["sweep two.toml --on process --json", "report runs/two --json", "compare runs/two runs/two --json"]
        for command in [*commands, "trace runs/two/ring", "doctor --json", "data list --json"]:
            done = tree.run(f"testbed {command}", tmp)
            found.add(f"{command}: exit {done.returncode}")
            if "--json" in command:
                found |= {f"{command}: key {key}" for key in keys(json.loads(done.stdout))}
        found |= left_in(tmp / "runs")
        return {line for line in found if not re.search(LOAD, line)}


def answers(*argv: str) -> bool:
    return shutil.which(argv[0]) is not None and subprocess.run(argv, capture_output=True).returncode == 0


def record_compose(tree: Tree) -> Iterator[str]:
    """The resolved compose.yaml, what `docker compose up` leaves, and what `testbed run --on compose` leaves."""
    if not answers("docker", "compose", "version"):
        raise NotHere("docker compose is not installed")
    if not answers("docker", "info"):
        raise NotHere("no engine answers")
    config = tree.run("docker compose --env-file .env.example config", tree.path).stdout
    yield f"## docker compose config\n{tree.plain(config, tree.path).replace(tree.path.name, 'NAME')}"
    built = tree.run([str(tree.path / "docker" / "image.sh")], tree.path, {"PYTHON": tree.python}, timeout=1800)
    if built.returncode:
        raise NotHere(f"the image cannot be built: {built.stderr[-500:]}")
    found = {}
    for mode in MODES:
        found[f"compose {mode}"] = one_run(tree, "compose", mode, "--rate", "100mbit")
        found[f"up {mode}"] = compose_up(tree, mode)
    yield by_fact(found)


def compose_up(tree: Tree, mode: str) -> set[str]:
    with tempfile.TemporaryDirectory(prefix="golden") as name:
        tmp = Path(name)
        shutil.copy(tree.path / "compose.yaml", tmp)
        for folder in ("runs", "data"):
            (tmp / folder).mkdir()
        env = {"MODE": mode, "MODEL": "lenet5", "DATA": "synthetic", "STEPS": "4", "BATCH": "16", "RATE": "100mbit"}
        try:
            done = tree.run("docker compose --ansi never up --no-build --no-color", tmp, env)
        finally:
            tree.run("docker compose down --volumes --timeout 1", tmp)
        (made,) = (tmp / "runs").glob("*/*")
        return left_in(made) | {f"exit {done.returncode}"}


def record_ids(tree: Tree) -> Iterator[str]:
    """Ids of all tests."""
    done = tree.run([tree.python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"], tree.path)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    yield "\n".join(sorted(line for line in done.stdout.splitlines() if "::" in line))


def record_coverage(tree: Tree) -> Iterator[str]:
    """Branch coverage of every folder by the unit tests; GOLDEN_COVERAGE names a data file that exists already."""
    given = os.environ.get("GOLDEN_COVERAGE")
    with tempfile.TemporaryDirectory() as name:
        data = {"COVERAGE_FILE": given or f"{name}/data"}
        if not given:
            unit = "-m coverage run --branch --source=testbed -m pytest -q -p no:cacheprovider tests/unit"
            done = tree.run(["nice", tree.python, *unit.split()], tree.path, data, timeout=3600)
            print(done.stdout.splitlines()[-1])
        tree.run([tree.python, "-m", "coverage", "json", "-q", "-o", f"{name}/c.json"], tree.path, data)
        files = json.loads(Path(name, "c.json").read_text())["files"]
    counts: dict[str, list[int]] = {}
    for path, file in files.items():
        parts = Path(path).parts
        own = file["summary"]
        for folder in {"testbed", "/".join(parts[:2]) if len(parts) > 2 else "testbed/*.py"}:
            count = counts.setdefault(folder, [0, 0, 0, 0])
            for index, key in enumerate(("covered_branches", "num_branches", "covered_lines", "num_statements")):
                count[index] += own[key]
    for folder, (branches, of, lines, statements) in sorted(counts.items()):
        yield f"{folder} branches {100 * branches / max(of, 1):.1f} lines {100 * lines / max(statements, 1):.1f}"


class NotHere(Exception):
    """This machine cannot do the part."""


PARTS: dict[str, Callable[[Tree], Iterator[str]]] = {
    "help": record_help,
    "refusals": record_refusals,
    "arguments": record_arguments,
    "folders": record_folders,
    "compose": record_compose,
    "ids": record_ids,
    "coverage": record_coverage,
}
UNORDERED = ("folders", "ids", "compose")
USUAL = ("help", "refusals", "arguments", "folders", "compose", "ids")


def rename(text: str, part: str, files: Iterable[Path]) -> str:
    """The recorded text with every intended rename of this part; the longest first."""
    pairs = []
    for line in (line for file in files for line in file.read_text().splitlines()):
        own = re.match(r"([a-z]+): ", line)
        if own and own[1] in PARTS:
            if own[1] != part:
                continue
            line = line[own.end() :]
        old, arrow, new = line.partition(" -> ")
        if arrow and not line.startswith("#"):
            pairs.append((old.strip(), new.strip()))
    for old, new in sorted(pairs, key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new.replace("\\", r"\\"), text)
    return re.sub(
        r"(?:^left .*\n)+", lambda files: "".join(sorted(files[0].splitlines(True))), text, flags=re.MULTILINE
    )


def fell(old: str, new: str) -> list[str]:
    """Folders whose coverage is lower than recorded."""
    now = {line.split()[0]: line.split() for line in new.splitlines()}
    lines = [line.split() for line in old.splitlines()]
    worse = [
        (line, now.get(line[0]))
        for line in lines
        if line[0] not in now or any(float(now[line[0]][k]) < float(line[k]) - COVERAGE_TOLERANCE for k in (2, 4))
    ]
    return [f"-{' '.join(line)}\n+{' '.join(found or ['no such folder'])}" for line, found in worse]


def function(test: str) -> str:
    """The name of a test without its file and its parameters."""
    return test.partition("::")[2].partition("[")[0]


def ids_lost(old: str, new: str, successors: Iterable[Path]) -> list[str]:
    """Ids that are gone: not in another file, not one of as many cases of the same function, without a successor.

    `old -> new`: the old may be a file, a function or an id; the new one, or the words "merged ..." or "removed ...".
    """
    now = set(new.splitlines())
    names = {test.partition("::")[2] for test in now}
    lines = [line.removeprefix("ids: ") for file in successors for line in file.read_text().splitlines()]
    pairs = [line.partition(" -> ") for line in lines if " -> " in line and line.startswith("tests/")]
    successor = {a.strip(" *"): b.strip(" (").split(" (")[0].rstrip("*") for a, _, b in pairs}

    before, after = (Counter(function(test) for test in text.splitlines()) for text in (old, new))

    def succeeded(test: str) -> bool:
        if after[function(test)] >= before[function(test)]:
            return True
        for start in (start for start in successor if test.startswith(start)):
            found = successor[start]
            if found.startswith(("merged", "removed", "or:")) or found + test[len(start) :] in now:
                return True
            if "::" in found and any(other.startswith(found) for other in now):
                return True
        return False

    gone = [test for test in old.splitlines() if test not in now and test.partition("::")[2] not in names]
    lost = [f"-{test}" for test in gone if not succeeded(test)]
    return [*lost, f"({len(old.splitlines())} ids recorded, {len(now)} now)"] if lost else []


def compare(part: str, new: str, extra: list[Path]) -> list[str]:
    """Unified diff of the recorded text, renamed, and the new one."""
    files = [HERE / "renames.txt", *extra]
    old = (RECORDED / f"{part}.txt").read_text()
    if part == "ids":
        return ids_lost(old, new, files)
    old = rename(old, part, files)
    if part == "coverage":
        return fell(old, new)
    if part in UNORDERED:
        old, new = ("\n".join(sorted(set(text.splitlines()))) for text in (old, new))
    sides = old.splitlines(), new.splitlines()
    return list(difflib.unified_diff(*sides, f"recorded/{part}.txt", "now", n=4, lineterm=""))


def replay_or_record(verb: str, tree: Tree, parts: list[str], extra: list[Path]) -> bool:
    """True where everything is as recorded."""
    same = True
    for part in parts:
        begun = time.monotonic()
        path = RECORDED / f"{part}.txt"
        if verb == "replay" and not path.exists():
            print(f"{part}: not recorded")
            continue
        try:
            text = "\n".join(PARTS[part](tree)).rstrip() + "\n"
        except NotHere as reason:
            print(f"{part}: left out, {reason}")
            continue
        took = f"{time.monotonic() - begun:.0f} s"
        if verb == "record":
            path.write_text(text)
            print(f"{part}: {len(text.splitlines())} lines, {took}")
            continue
        found = compare(part, text, extra)
        print("\n".join([f"{part}: {'differs' if found else 'same'}, {took}", *found]), flush=True)
        same &= not found
    return same


def exact_modes(tree: Tree) -> list[str]:
    """Every mode that the command line lists, with small buckets, some with a codec, some with local steps."""
    listed = json.loads(tree.run("testbed modes --json", tree.path).stdout)
    plain = [row["mode"] for row in listed if "every" not in row["mode"]]
    coded = [f"{row['mode']}/{codec}" for row in listed for codec in row["codecs"] if row["mode"] in ("ring", "direct")]
    local = ["ring/every:2", "allreduce/every:2", "gather/every:3@2", "tree/bucket:64KiB/every:2"]
    return [mode.replace("bucket:5MiB", "bucket:64KiB") for mode in [*plain, *coded, *local]]


def hashes(old: Tree, new: Tree, sizes: Iterable[int]) -> bool:
    """Train every mode by both worktrees at once and compare the final parameters."""
    same, modes = True, exact_modes(old)
    for size in sizes:
        begun = time.monotonic()

        def train(tree: Tree, nodes: int = size) -> str:
            with tempfile.TemporaryDirectory() as name:
                argv = [tree.python, str(HERE / "hashes.py"), str(nodes), name, *modes]
                done = tree.run(argv, tree.path, {"OMP_NUM_THREADS": "1"}, timeout=1800)
                return done.stdout + done.stderr

        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(train, (old, new)))
        found = list(difflib.unified_diff(*(text.splitlines() for text in texts), "old", "new", n=0, lineterm=""))
        failed = [line for line in texts[0].splitlines() if not re.search(r": [0-9a-f]{32}", line)]
        took = f"{time.monotonic() - begun:.0f} s"
        print("\n".join([f"n={size}: {len(modes)} modes, {'differ' if found else 'same'}, {took}", *failed, *found]))
        same &= not found and not failed
    return same


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", choices=["record", "replay", "hashes"])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [default: {', '.join(USUAL)}]")
    parser.add_argument("--tree", type=Path, default=ROOT, help="worktree whose code is driven [default: this one]")
    parser.add_argument("--old", type=Path, help="worktree of the other side, for hashes")
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 3, 4], help="sizes, for hashes")
    parser.add_argument("--renames", type=Path, nargs="*", default=[], help="more files like renames.txt")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}. Known: {', '.join(PARTS)}.")
    if options.verb == "hashes":
        if options.old is None:
            parser.error("hashes needs --old WORKTREE")
        sys.exit(not hashes(Tree(options.old), Tree(options.tree), options.nodes))
    parts = options.parts or list(USUAL)
    sys.exit(not replay_or_record(options.verb, Tree(options.tree), parts, options.renames))


if __name__ == "__main__":
    main()
