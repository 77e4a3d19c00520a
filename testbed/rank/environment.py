"""What a measurement depends on and the spec does not say: versions, kernel, processor, load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from testbed import __version__
from testbed.rank.traffic import congestion_control


def describe_environment() -> dict[str, Any]:
    """Facts for the start record."""
    return {
        "testbed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "own cores": sorted(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "congestion": congestion_control(),
        "host": platform.node(),
    }


def _cpu_model() -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
