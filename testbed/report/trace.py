"""Write a trace of one run: all ranks on one clock, in the format of Chrome and Perfetto (ui.perfetto.dev).

Each rank is a process. Thread 0 is the training loop (steps, with their phases inside). Thread 1 shows when the loop
was blocked, thread 2 when it copied gradients. The threads after these are buffers on the wire. Buffers that overlap
are on different threads, because spans of one thread must nest. A buffer that was on the wire when a step ended has
two spans: `bucket 3 gather` in that step, `bucket 3 gather (cont.)` in the next. Injected faults are a process after
the ranks, with one thread for each rank that had a fault. A rank that lost another rank has a mark on its loop. A
trace of a failed run can be written, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.report.load import DAMAGE, FaultedRun, LoadedRun, Rank, Steps, read_faulted, read_run, sentence
from testbed.results.folder import RunFolder, write_whole
from testbed.results.table import label
from testbed.spec.errors import TestbedError, UsageError

LOOP, BLOCKED, COPIES, WIRE = 0, 1, 2, 3  # thread numbers
TRACE = "trace.json"
Event = dict[str, Any]


def write_trace(path: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write the trace of the run folder `path`. Return the file and its number of spans. Raise UsageError."""
    try:
        run = read_run(RunFolder(path), whole=False)
        history = read_faulted(run.folder)
    except TestbedError as error:
        raise UsageError(f"no trace can be made. {error}") from None
    except DAMAGE as error:
        raise UsageError(f"{path}: no trace can be made, {sentence(error)}. Run it again.") from None
    if not any(len(rank.steps.at) for rank in run.ranks):
        raise UsageError(f"{path}: no trace can be made (no rank finished a step).")
    merged = trace(run, history)
    target = out or path / TRACE
    write_whole(target, json.dumps(merged, separators=(",", ":")))
    return target, sum(event["ph"] == "X" for event in merged["traceEvents"])


def trace(run: LoadedRun, history: FaultedRun | None = None) -> Event:
    """Return the trace. Times are microseconds since the first step of any rank, or since an earlier fault."""
    history = history if history and history.one_clock else None
    begins = [
        float(rank.steps.at[0]) - run.network.offsets.get(rank.number, 0.0) for rank in run.ranks if len(rank.steps.at)
    ]
    zero = min([*begins, *(episode.begin for episode in history.episodes)] if history else begins)
    events = [event for rank in run.ranks for event in _rank(rank, run, zero)]
    events += _faults(history, zero) if history else []
    facts = {"run": run.spec.name, "mode": label(run.spec), "clock_error_us": run.network.offset_error * 1e6}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _faults(history: FaultedRun, zero: float) -> Iterator[Event]:
    """Yield a span for each fault with a duration, a mark for each other fault and for each rank that detected one."""
    process = history.spec.world
    yield _meta(process, 0, "process_name", {"name": "injected faults"})
    yield _meta(process, 0, "process_sort_index", {"sort_index": process})
    for rank in sorted({episode.rank for episode in history.episodes}):
        yield _meta(process, rank, "thread_name", {"name": f"rank {rank}"})
    for episode in history.episodes:
        if episode.end is None:
            yield _mark(episode.fault, process, episode.rank, episode.begin - zero, "g")
        else:
            yield _span(episode.fault, process, episode.rank, episode.begin - zero, episode.end - zero)
    for rank, at in history.noticed:
        yield _mark("lost another rank", rank, LOOP, max(0.0, at - zero), "p")


def _rank(rank: Rank, run: LoadedRun, zero: float) -> Iterator[Event]:
    shift = -zero - run.network.offsets.get(rank.number, 0.0)
    names = {LOOP: "training loop", BLOCKED: "blocked by communication", COPIES: "copying gradients"}
    lanes: list[float] = []  # the time at which each thread of buffers is free again
    spans: list[Event] = []
    for k in range(len(rank.steps.step)):
        spans += _step(rank.steps, k, rank.number, float(rank.steps.at[k]) + shift, lanes)
    names |= {WIRE + lane: f"buffers {lane}" if lane else "buffers on the wire" for lane in range(len(lanes))}
    yield _meta(rank.number, 0, "process_name", {"name": f"rank {rank.number}"})
    yield _meta(rank.number, 0, "process_sort_index", {"sort_index": rank.number})
    for thread, name in names.items():
        yield _meta(rank.number, thread, "thread_name", {"name": name})
        yield _meta(rank.number, thread, "thread_sort_index", {"sort_index": thread})
    yield from spans


def _step(steps: Steps, k: int, rank: int, begin: float, lanes: list[float]) -> Iterator[Event]:
    """Yield the spans of one step, cut at its end, because rounding may move an end beyond it."""
    end = begin + float(steps.total[k])

    def span(name: str, offset: float, seconds: float, thread: int, **args: Any) -> Event:
        return _span(name, rank, thread, min(begin + offset, end), min(begin + offset + seconds, end), **args)

    number = int(steps.step[k])
    yield span(f"step {number}", 0.0, float(steps.total[k]), LOOP, loss=_finite(float(steps.loss[k])))
    for name, offset, seconds in steps.phases[k]:
        yield span(name, offset, seconds, LOOP)
    for offset, seconds in steps.stalls[k]:
        yield span("blocked", offset, seconds, BLOCKED)
    for offset, seconds in steps.copying[k]:
        yield span("copies", offset, seconds, COPIES)
    for comm in sorted(steps.comm[k], key=lambda each: each.offset):
        lane = _free_lane(lanes, begin + comm.offset, begin + comm.offset + comm.seconds)
        yield span(
            comm.name, comm.offset, comm.seconds, WIRE + lane, bytes=comm.size, step=number, continued=comm.continued
        )


def _free_lane(lanes: list[float], begin: float, end: float) -> int:
    """Return the first thread that is free at `begin`, and mark it as used until `end`."""
    lane = next((n for n, free in enumerate(lanes) if free <= begin + 1e-7), len(lanes))
    if lane == len(lanes):
        lanes.append(0.0)
    lanes[lane] = end
    return lane


def _span(name: str, process: int, thread: int, begin: float, end: float, **args: Any) -> Event:
    return {
        **{"name": name, "ph": "X", "pid": process, "tid": thread, "cat": "testbed"},
        **{
            "ts": round(begin * 1e6, 3),
            "dur": round(max(0.0, end - begin) * 1e6, 3),
            **({"args": args} if args else {}),
        },
    }


def _mark(name: str, process: int, thread: int, at: float, scope: str) -> Event:
    """Return an instant. Scope `g` draws it over all processes, `p` over its own process."""
    return {"name": name, "ph": "i", "s": scope, "pid": process, "tid": thread, "ts": round(at * 1e6, 3)}


def _meta(rank: int, thread: int, name: str, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}


def _finite(value: float) -> float | None:
    """Return None for nan and infinity, which JSON does not have, else the value."""
    return value if value - value == 0 else None
