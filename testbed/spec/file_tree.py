"""Lists and removes folders to which a user's script may have written, so that they may be of any depth.

`Path.rglob`, `os.walk` and `shutil.rmtree` are recursive in Python 3.11: a folder some hundred levels deep ends them
with a RecursionError, which no handler of OSError catches.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


def entries_below(top: Path, leave_out: Sequence[str] = ()) -> Iterator[os.DirEntry[str]]:
    """Yield every entry below a folder, of each folder sorted by name. Symlinks are not followed.

    `leave_out`: names or patterns of folders that are neither yielded nor entered. A folder that cannot be read, or
    whose path is longer than the system allows, counts as empty.
    """
    queue = [os.fspath(top)]
    while queue:
        try:
            with os.scandir(queue.pop()) as found:
                entries = sorted(found, key=lambda each: each.name)
        except OSError:
            continue
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and any(fnmatch.fnmatch(entry.name, each) for each in leave_out):
                continue
            yield entry
            if is_folder:
                queue.append(entry.path)


def remove_tree(top: Path) -> None:
    """Remove a folder, also with subfolders that have no permissions. Leave what cannot be removed.

    The commands follow no symlink and do not build long paths. Root needs no permissions.
    """
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", top], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--", top], capture_output=True, check=False)
