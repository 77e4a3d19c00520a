"""Measure a substrate's network: one probe process per node, their progress followed, a receipt in the end."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed.control.substrates.base import NodePlan, Process, Substrate
from testbed.control.tail import Tail
from testbed.net.clock import Clock
from testbed.net.pace import pace, schedule
from testbed.net.probe import Flow, Measurement
from testbed.net.receipt import Receipt
from testbed.net.rendezvous import PATIENCE
from testbed.spec.errors import NetworkInvalid

Progress = Callable[[dict[str, Any]], None]
_NODE = re.compile(r"\bnode(\d{1,4})\b", re.ASCII)
POLL = 0.05  # seconds between looks at the logs
GRACE = 3.0  # seconds for the others to say why, once one has failed
WAY_OUT = "Try again; if it stays so, `testbed doctor` may know why, and --set probe=false goes without"


def probe(substrate: Substrate, plans: Sequence[NodePlan], progress: Progress) -> Receipt:
    """Measure every directed link and the fan-in; NetworkInvalid, with the nodes' own words, when it cannot be done."""
    rates = [plan.link.rate if substrate.shaped else None for plan in plans]
    with tempfile.TemporaryDirectory(prefix="testbed-probe-") as folder:
        logs = [Path(folder) / f"{node.name}.log" for node in substrate.nodes]
        started = _start(substrate, rates, logs)
        try:
            _follow(started, logs, progress, seconds=_longest(rates))
            return Receipt.of(_measurement(logs[0]), rates)
        finally:
            _end(started)


def _start(substrate: Substrate, rates: Sequence[int | None], logs: Sequence[Path]) -> list[Process]:
    addresses = [node.address for node in substrate.nodes]
    common = ["-m", "testbed.net.probe", "--addresses", ",".join(addresses), "--port", str(substrate.port())]
    started = []
    for node, (rate, log) in enumerate(zip(rates, logs, strict=True)):
        argv = [substrate.python, *common, "--rank", str(node), "--rate", str(rate or "none")]
        started.append(substrate.start(node, argv, {}, log, quota=False))
    return started


def _longest(rates: Sequence[int | None]) -> float:
    """Seconds after which something is wrong that the probe itself did not notice."""
    return 2 * PATIENCE + sum(pace(rates, pairs).longest for pairs in schedule(len(rates)))


def _follow(started: Sequence[Process], logs: Sequence[Path], progress: Progress, seconds: float) -> None:
    """Pass every event on until all have ended; one failure ends the wait soon after."""
    tails = [Tail(log) for log in logs]
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in started]
        for event in (event for tail in tails for event in tail.read()):
            if event.get("event") == "flow":
                progress(event)
        if None not in codes and not any(codes):
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
        if None not in codes or time.monotonic() > deadline:
            raise NetworkInvalid(_complaint(codes, logs))
        time.sleep(POLL)


def _complaint(codes: Sequence[int | None], logs: Sequence[Path]) -> str:
    """Every node's own words, each once; a probe knows nodes by number, the user by name."""
    names = [log.stem for log in logs]
    words = dict.fromkeys(_last_words(log, names) for code, log in zip(codes, logs, strict=True) if code)
    silent = [name for code, name in zip(codes, names, strict=True) if code is None]
    parts = [word for word in words if word] + ([f"no end of it on {', '.join(silent)}"] if silent else [])
    return f"the probe of the network failed: {'; '.join(parts)}. {WAY_OUT}"


def _last_words(log: Path, names: Sequence[str]) -> str:
    sentences = [str(event["sentence"]) for event in Tail(log).read() if event.get("event") == "error"]
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    if sentences:
        return _NODE.sub(lambda found: dict(enumerate(names)).get(int(found[1]), found[0]), sentences[-1])
    return f"{log.stem}: {lines[-1] if lines else 'ended without a word'}"


def _measurement(log: Path) -> Measurement:
    result = next((event for event in Tail(log).read() if event.get("event") == "result"), None)
    if result is None:
        raise NetworkInvalid(f"the probe of the network ended without a result on {log.stem}. {WAY_OUT}")
    flows = [Flow(**flow) for flow in result["flows"]]
    clocks = [Clock(**clock) for clock in result["clocks"]]
    return Measurement(flows, result["mtu"], result["congestion"], result["seconds"], clocks)


def _end(started: Sequence[Process]) -> None:
    for process in started:
        if process.poll() is None:
            process.signal(signal.SIGKILL)  # holds nothing worth writing down
    for process in started:
        with contextlib.suppress(TimeoutError):
            process.wait(GRACE)
