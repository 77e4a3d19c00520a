"""What the image is made of, as one hash: it becomes a label, because image ids differ between image stores."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker/Dockerfile", "docker/entrypoint.py", "docker/packages.sh", "docker/packages.txt")


def sources(root: Path) -> Iterator[Path]:
    """Every file that is copied into the image or decides what is in it, in a fixed order."""
    yield from (root / name for name in FILES)
    yield from sorted((root / "testbed").rglob("*.py"))


def content_hash(root: Path = ROOT) -> str:
    """SHA-256 over names and contents, the first 16 digits."""
    digest = hashlib.sha256()
    for path in sources(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.stdout.write(content_hash() + "\n")
