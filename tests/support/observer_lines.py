"""Lines as the observer sends them from a script, for tests of what receives them."""

from __future__ import annotations

import json
from typing import Any

from testbed.results.records import Start, Step, encode

START: dict[str, Any] = json.loads(
    encode(
        Start(
            rank=0,
            world=1,
            unix=0.0,
            parameters=1,
            gradient_bytes=4,
            tensors=1,
            deadline=60.0,
            counter="interface eth0",
        )
    )
)
STEP: dict[str, Any] = json.loads(
    encode(
        Step(
            step=0,
            epoch=0,
            at=0.0,
            data=0.0,
            forward=0.0,
            backward=0.0,
            sync=0.0,
            update=0.0,
            total=0.0,
            loss=0.0,
            images=0,
            sent=None,
            received=None,
        )
    )
)
