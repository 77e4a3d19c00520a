"""Do two versions of the code train bit for bit the same model? Five seeded steps of VGG-11 and ResNet-18 with each.

    python -m tests.bench.identity 78078b9^    this tree against the last commit whose pipeline sent through Gloo

Each version is run by its own command, the old one in a temporary worktree, on four plain processes with buckets of
equal size. What is compared are the SHA-256 hashes of all parameters that the ranks record after the last step. The
exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.provenance import ROOT

MODELS = ("vgg11", "resnet18")
NODES, BATCH, STEPS, SEED = 4, 32, 5, 11
MODE = "ring/bucket:2MiB/pipeline"
FLAGS = ["--mode", MODE, "--nodes", str(NODES), "--batch", str(BATCH), "--steps", str(STEPS), "--seed", str(SEED)]
FLAGS += ["--data", "synthetic", "--on", "process", "--set", "probe=false", "--set", "evaluate=never"]
TIMEOUT_S = 600.0


def main() -> int:
    """Print each model's hash in both versions. Return exit code 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.identity", description=__doc__.partition("\n")[0])
    parser.add_argument("old", metavar="OLD_COMMIT", help="a commit, e.g. 78078b9^")
    old, equal = parser.parse_args().old, True
    with worktree(old) as tree:
        for model in MODELS:
            before, after = (trained_hash(model, each) for each in (tree, ROOT))
            equal = equal and before == after
            print(f"{model}, {MODE}, N = {NODES}, {STEPS} steps: {'equal' if before == after else 'DIFFERENT'}")
            print(f"  {old:<12} {before}\n  {'this tree':<12} {after}", flush=True)
    return 0 if equal else 1


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def trained_hash(model: str, tree: Path) -> str:
    """Train with the code of this tree; return the hash of the parameters after the last step, equal on all ranks."""
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"PYTHONPATH": str(tree), "TESTBED_SHARE": "1"}
        argv = [sys.executable, "-m", "testbed.control", "run", "--model", model, *FLAGS, "--out", f"{name}/run"]
        subprocess.run(argv, env=env, cwd=name, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        return last_hash(Path(name) / "run")


def last_hash(folder: Path) -> str:
    """The hash after the last step of a run; SystemExit if the ranks have not all recorded the same one."""
    found = set()
    for rank in range(NODES):
        lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
        hashes = [record for record in map(json.loads, lines) if record["kind"] == "hash"]
        found.add((hashes[-1]["step"], hashes[-1]["parameters"]))
    if len(found) != 1 or next(iter(found))[0] != STEPS:
        raise SystemExit(f"{folder}: the ranks have no common hash after step {STEPS}: {found}")
    return str(next(iter(found))[1])


if __name__ == "__main__":
    sys.exit(main())
