"""Data sets that a script finds without the internet: links in its working folder to the testbed's own copies.

Runs in the launcher. torchvision's classes find a data set at `root`, e.g. ./data, if it is linked there; vision.py
acts inside the script.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.data.layouts import FOLDERS, layouts
from testbed.spec.datasets import dataset_info


def offer(data: Path, work: Path, places: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Link every data set that is complete in `data` at the places in the working folder; return what vision.py needs.

    A layout that nobody made before is made in `scratch`. What the script brings itself stays as it is.
    """
    offered = {}
    for name, root in layouts(data, scratch).items():
        for place in places:
            _link(work / place / FOLDERS[name], root.resolve() / FOLDERS[name], work)
        offered[name] = {"root": str(root.resolve()), "digests": dict(dataset_info(name).digests)}
    return offered


def _link(target: Path, source: Path, work: Path) -> None:
    """Make the link and the folders above it; no-op if a folder above it is a link."""
    missing = [each for each in reversed(target.parents) if each.is_relative_to(work) and not os.path.lexists(each)]
    above = [each for each in target.parents if each.is_relative_to(work) and each not in missing]
    if os.path.lexists(target) or any(each.is_symlink() or not each.is_dir() for each in above):
        return
    for folder in missing:
        folder.mkdir()
    target.symlink_to(source)
