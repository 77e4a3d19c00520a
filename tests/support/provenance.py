"""Which commit a stored result belongs to: the last one that changed the measured code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRTY = "+"  # suffix of a commit: the tree had uncommitted changes
ABBREVIATED = 10  # digits of a commit; git's own choice depends on how many objects a clone has


def code_commit(*paths: str) -> str:
    """Return the last commit that changed one of these paths."""
    found = _git("log", "-1", "--format=%h", f"--abbrev={ABBREVIATED}", "--", *paths)
    return found + (DIRTY if _git("status", "--porcelain", "--", *paths) else "")


def commit_of_all(*commits: str) -> str:
    """Return the commit of a measurement during which the commit was read several times: dirty if it changed."""
    first = commits[0]
    return first if len(set(commits)) == 1 else first.removesuffix(DIRTY) + DIRTY


def current(stored: str, commit: str) -> bool:
    """Return True if a stored result belongs to this commit. A dirty one never does: its changes are unknown."""
    return bool(stored) and commit.startswith(stored) and not commit.endswith(DIRTY)


def machine() -> str:
    """Return processor, cores and kernel of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(models), platform.machine())} ({os.cpu_count()} cores), Linux {platform.release()}"


def changes_since(stored: str, *paths: str) -> int | None:
    """Return how many commits changed these paths since the stored one.

    None if it is not in this history, or dirty: what was changed then is in no commit.
    """
    known = stored and not stored.endswith(DIRTY) and _git("rev-parse", "--verify", "--quiet", f"{stored}^{{commit}}")
    return int(_git("rev-list", "--count", f"{stored}..HEAD", "--", *paths)) if known else None


def has_file(stored: str, path: str) -> bool:
    """Return True if the tree of the stored commit has this file; False if the commit is not in this history."""
    commit = stored.removesuffix(DIRTY)
    return bool(commit and _git("rev-parse", "--verify", "--quiet", f"{commit}:{path}"))


def has_whole_history() -> bool:
    """Return False in a shallow clone and outside of git."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
