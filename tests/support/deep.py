"""A folder that is deeper than Python's limit of recursion."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def make_deep_folder(top: Path) -> None:
    """Create folders inside each other, below `top`, and a file in the innermost one."""
    handle = os.open(top, os.O_PATH)
    for _ in range(sys.getrecursionlimit() + 10):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_PATH, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
    os.close(handle)
