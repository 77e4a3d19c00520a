"""What identifies this clone: the hash of the image's content, and the name of its Compose project.

The hash becomes the label of the image: image ids differ between image stores. `make up` passes the name to Compose as
COMPOSE_PROJECT_NAME. The name that compose.yaml makes from PWD is not always the clone's own: Compose removes `/` and
dots from it, so that /a/bc and /ab/c are one project.

docker/image.sh and make run this module with any Python before a virtual environment exists, so it needs no packages:

    python3 -m testbed.control.substrates.clone image|project      print the hash, or the name
"""

from __future__ import annotations

import hashlib
import os
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


VARIABLE = "COMPOSE_PROJECT_NAME"
HASH_DIGITS = 12
MAX_FOLDER_CHARACTERS = 20  # names of containers and networks begin with the project's name


def project_name(folder: Path = ROOT) -> str:
    """Return a name that no other folder of this machine has, in the characters that Compose allows."""
    path = folder.resolve()
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:HASH_DIGITS]
    readable = re.sub(r"[^a-z0-9]+", "-", path.name.lower())[:MAX_FOLDER_CHARACTERS].strip("-")
    return "-".join(word for word in ("testbed", readable, digest) if word)


if __name__ == "__main__":
    printed = {"image": content_hash, "project": lambda: os.environ.get(VARIABLE) or project_name()}[sys.argv[1]]()
    sys.stdout.write(printed + "\n")
