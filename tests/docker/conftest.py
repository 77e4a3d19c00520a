"""The image that every docker test runs on."""

from __future__ import annotations

import os
import subprocess

import pytest
from cluster import ROOT


@pytest.fixture(scope="session", autouse=True)
def image() -> str:
    """The image of the code as it is now; a rebuild after a change takes seconds."""
    subprocess.run([ROOT / "docker" / "image.sh"], env=os.environ | {"CI": "true"}, timeout=900, check=True)
    return "testbed:latest"
