"""Every docker test needs the image."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def built(image: str) -> str:
    return image
