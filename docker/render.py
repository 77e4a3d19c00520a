"""Print the Compose file: `python docker/render.py > compose.yaml`, or `python docker/render.py 8` for eight nodes."""

from __future__ import annotations

import sys

from testbed.control.substrates.engine import render
from testbed.spec.errors import TestbedError

if __name__ == "__main__":
    try:
        sys.stdout.write(render(int(sys.argv[1]) if sys.argv[1:] else 4))
    except (TestbedError, ValueError) as error:
        sys.exit(f"{error}")
