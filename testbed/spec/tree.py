"""Walk the folder of a user's script: what is copied for every rank, and how much that may be."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from testbed.spec.errors import refuse
from testbed.spec.script import NOT_COPIED
from testbed.spec.units import approximate_size

MAX_COPY_BYTES = 2 << 30
MAX_COPY_FILES = 100_000
LARGEST = 3  # entries that a message names


def walk(source: Path, exclude: Sequence[str]) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield every entry below a folder with its relative path, a folder before its content. Links are not followed."""
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
    """Raise UsageError if a folder has more than is copied for every rank, or something that cannot be read."""
    sizes: dict[str, int] = {}
    files = 0
    try:
        for entry, relative in walk(source, exclude):
            if entry.is_file(follow_symlinks=False):
                files += 1
                top = relative.partition(os.sep)[0]
                sizes[top] = sizes.get(top, 0) + entry.stat(follow_symlinks=False).st_size
            if files > 10 * max_files:
                break  # e.g. a whole disk: what was found is enough for the message
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
