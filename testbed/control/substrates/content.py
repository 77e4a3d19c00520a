"""A hash over the content of the image, which becomes its label: image ids differ between image stores.

docker/image.sh runs this module with any Python before a virtual environment exists, so it needs no packages.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from testbed.spec.errors import Unavailable

ROOT = Path(__file__).resolve().parents[3]
BUILD_FILES = (".dockerignore", "docker/Dockerfile", "docker/packages.sh", "docker/packages.txt", "docker/torch.sh")


def copied_paths(root: Path) -> list[str]:
    """Return the files and folders in the Dockerfile's COPY lines, which are the only list of them."""
    lines = re.findall(r"^COPY (.+) \S+$", (root / "docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    return [name for line in lines for name in line.split()]


def image_files(root: Path) -> Iterator[Path]:
    """Yield every file that is copied into the image, sorted, without bytecode and hidden files (.dockerignore)."""
    for path in (root / name for name in copied_paths(root)):
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            ignored = any(part.startswith((".", "__pycache__")) for part in each.relative_to(root).parts)
            if not ignored and not each.is_dir():
                yield each


def content_hash(root: Path = ROOT) -> str:
    """Return 16 hex digits of a SHA-256 over names and contents of the files in the image and of those that build it.

    Raises Unavailable without a clone of the repository.
    """
    if not (root / "docker/Dockerfile").is_file():
        rule = "has no folder docker/, which the image and the Compose file are made from"
        raise Unavailable(f"{root}: {rule}. Use the `testbed` of a clone of the repository (make venv)")
    digest = hashlib.sha256()
    for path in [*(root / name for name in BUILD_FILES), *image_files(root)]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.stdout.write(content_hash() + "\n")
