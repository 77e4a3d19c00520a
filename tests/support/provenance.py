"""From which commit a kept result is: the last that changed what was measured; and were there changes beside it?"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRTY = "+"  # after a commit: there were changes beside it


def code_commit(*paths: str) -> str:
    """The last commit that touched one of these paths."""
    found = _git("log", "-1", "--format=%h", "--", *paths)
    return found + (DIRTY if _git("status", "--porcelain", "--", *paths) else "")


def throughout(*commits: str) -> str:
    """The commit of something that took its time: marked where what was asked on the way is not always the same."""
    first = commits[0]
    return first if len(set(commits)) == 1 else first.removesuffix(DIRTY) + DIRTY


def current(kept: str, commit: str) -> bool:
    """Is what was kept of the present commit? Never where there were changes beside it: which ones nobody knows."""
    return bool(kept) and kept == commit and not kept.endswith(DIRTY)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
