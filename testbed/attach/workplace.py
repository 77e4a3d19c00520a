"""The folders of one script on one node: a working copy of the user's folder, and the Python path with the observer.

    ROOT/work      copy of the user's folder, the script's working folder
    ROOT/home      HOME and TMPDIR of the script
    ROOT/python    PYTHONPATH: `testbed` and sitecustomize, nothing else
    ROOT/methods   TESTBED_METHODS: the user's own method, if one replaces the script's synchronisation
    ROOT/observer  the observer's socket

When the script has ended, new and changed files in `work` are collected: regular files only, up to a size and number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import testbed
from testbed.data.layouts import FOLDERS, layouts
from testbed.results.observations import Files
from testbed.spec.datasets import dataset_info
from testbed.spec.file_tree import entries_below, remove_tree
from testbed.spec.script import MAX_COLLECTED_BYTES, MAX_COLLECTED_FILES, MAX_DEPTH, check_tree, walk
from testbed.spec.units import approximate_size

FICLONE = 0x40049409  # ioctl: a copy that shares the file's blocks until one of both is written to
MAX_NAMES, MAX_NAME = 10, 200  # collected files that are named in the record; characters of a name
NOT_NEEDED = ("control", "report", "predict", "__pycache__")  # in a script's process


class Workplace:
    """Makes the folders. Leaving the context removes them. Raises UsageError if the user's folder is too large."""

    def __init__(self, folder: Path, owner: tuple[int, int], exclude: Sequence[str] = (), mark: str = "") -> None:
        self.root = Path(tempfile.mkdtemp(prefix=f"testbed-{mark}-script-" if mark else "testbed-script-"))
        self.work, self.python, self.home = (self.root / name for name in ("work", "python", "home"))
        self.methods = self.root / "methods"
        self.socket = self.root / "observer"
        self.owner = owner
        try:
            self.root.chmod(0o711)
            self.home.mkdir()
            self._before = copy_tree(folder, self.work, exclude)
            _copy_package(self.python)
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def put_method(self, file: Path) -> None:
        """Copy the user's own method, which the script's process executes."""
        self.methods.mkdir()
        shutil.copyfile(file, self.methods / file.name)

    def hand_over(self) -> None:
        """Make the script's user the owner of `work` and `home`, if that is another user."""
        if self.owner[0] != os.geteuid():
            for path in (str(self.work), str(self.home), *(entry.path for entry in entries_below(self.work))):
                os.chown(path, *self.owner, follow_symlinks=False)

    def take_back(self) -> None:
        """Make this user the owner of all files again, also in folders without permissions. Root needs no change."""
        queue = [self.work, self.home] if os.geteuid() not in (0, self.owner[0]) else []
        while queue:
            folder = queue.pop()
            with contextlib.suppress(OSError):
                os.chown(folder, os.geteuid(), os.getegid(), follow_symlinks=False)
                folder.chmod(0o700)
                for entry in os.scandir(folder):
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(Path(entry.path))
                    else:
                        os.chown(entry.path, os.geteuid(), os.getegid(), follow_symlinks=False)

    def collect(self, target: Path) -> Files:
        """Copy new and changed files to `target`. All processes of the script must have ended."""
        self.take_back()
        return collect(self.work, self._before, target, self.owner)

    def remove(self) -> None:
        """Remove the folders, also those from which the script has removed all permissions, and those of any depth."""
        remove_tree(self.root)


Fingerprint = tuple[int, int]  # size, time of the last change in ns


def copy_tree(source: Path, target: Path, exclude: Sequence[str]) -> dict[str, Fingerprint]:
    """Copy regular files, folders and links. Return the fingerprint of every copied file by its relative path.

    Raise UsageError if the folder is too large.
    """
    check_tree(source, exclude)
    copied: dict[str, Fingerprint] = {}
    target.mkdir()
    for entry, relative in walk(source, exclude):
        place = target / relative
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry.path))
            copied[relative] = fingerprint(place.lstat())
        elif entry.is_dir():
            place.mkdir()
        elif entry.is_file():
            _copy_file(entry.path, place)
            copied[relative] = fingerprint(place.lstat())
    return copied


def _copy_file(source: str, target: Path) -> None:
    """Copy a file with its mode, as a reflink (FICLONE) where the file system supports it."""
    with open(source, "rb") as content, target.open("wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, content.fileno())
        except OSError:
            shutil.copyfileobj(content, copy, 1 << 20)
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o777 | 0o600)


def _copy_package(target: Path) -> None:
    package = Path(testbed.__file__).parent
    shutil.copytree(package, target / "testbed", ignore=shutil.ignore_patterns(*NOT_NEEDED))
    shutil.copyfile(package / "attach" / "inject" / "sitecustomize.py", target / "sitecustomize.py")


def fingerprint(status: os.stat_result) -> Fingerprint:
    return status.st_size, status.st_mtime_ns


def collect(work: Path, before: dict[str, Fingerprint], target: Path, owner: tuple[int, int]) -> Files:
    """Copy new and changed regular files to `target`, which is made if there are any. Return their record."""
    count = size = left_out = 0
    kept: list[str] = []
    reasons: dict[str, None] = {}
    for entry in entries_below(work):
        relative = os.path.relpath(entry.path, work)
        try:
            if entry.is_dir():  # also a symlink to a folder, e.g. to a data set
                continue
            status = entry.stat(follow_symlinks=False)
            if before.get(relative) == fingerprint(status):
                continue
            reason = _why_left_out(relative, status, count, size)
            if not reason:
                _collect_file(Path(entry.path), target / relative)
        except OSError as error:
            reason = f"could not be copied ({error.strerror})"
        if reason:
            left_out += 1
            reasons.setdefault(reason)
        else:
            count, size = count + 1, size + status.st_size
            kept.append(relative)
    if os.geteuid() == 0 and target.exists():
        for path in (target, *target.rglob("*")):
            os.chown(path, *owner, follow_symlinks=False)
    first = [name for name in sorted(kept) if len(name) <= MAX_NAME][:MAX_NAMES]
    return Files(count=count, bytes=size, left_out=left_out, names=first, reasons=list(reasons)[:10])


def _why_left_out(relative: str, status: os.stat_result, count: int, size: int) -> str:
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return "only regular files without links are collected"
    if not relative.isprintable() or ".." in Path(relative).parts:
        return "names with control characters are not collected"
    if relative.count(os.sep) > MAX_DEPTH:
        return f"files below more than {MAX_DEPTH} folders are not collected"
    if count >= MAX_COLLECTED_FILES:
        return f"at most {MAX_COLLECTED_FILES} files of a rank are collected"
    if size + status.st_size > MAX_COLLECTED_BYTES:
        return f"at most {approximate_size(MAX_COLLECTED_BYTES)} of a rank are collected"
    return ""


def _collect_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content, target.open("xb") as copy:
        shutil.copyfileobj(content, copy, 1 << 20)


# Data sets for a script without the internet. torchvision's classes find them at `root`, e.g. ./data, as links to the
# testbed's own copies. vision.py runs inside the script.


def offer(data: Path, work: Path, places: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Link every data set that is complete in `data` at `places` in the working folder. Return what vision.py needs.

    A layout that does not exist yet is made in `scratch`. Files of the script itself are not replaced.
    """
    offered = {}
    for name, root in layouts(data, scratch).items():
        for place in places:
            _link_data(work / place / FOLDERS[name], root.resolve() / FOLDERS[name], work)
        offered[name] = {"root": str(root.resolve()), "digests": dict(dataset_info(name).digests)}
    return offered


def _link_data(target: Path, source: Path, work: Path) -> None:
    """Make the link and the folders above it. Do nothing if the target exists, or a folder above it is a link."""
    missing = [each for each in reversed(target.parents) if each.is_relative_to(work) and not os.path.lexists(each)]
    above = [each for each in target.parents if each.is_relative_to(work) and each not in missing]
    if os.path.lexists(target) or any(each.is_symlink() or not each.is_dir() for each in above):
        return
    for folder in missing:
        folder.mkdir()
    target.symlink_to(source)
