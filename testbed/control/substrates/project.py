"""The name of this clone's Compose project: `make up` passes it to Compose as COMPOSE_PROJECT_NAME.

The name that compose.yaml makes from PWD is not always the clone's own: Compose removes `/` and dots from it, so
that /a/bc and /ab/c are one project. make runs this module with any Python, so it needs no packages.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from testbed.control.substrates.content import ROOT

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
    sys.stdout.write((os.environ.get(VARIABLE) or project_name()) + "\n")
