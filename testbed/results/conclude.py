"""Summary: what one run folder says in one row of a table."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, Field

from testbed.results.folder import RunFolder, read_bounded
from testbed.results.records import read
from testbed.spec.base import Spec
from testbed.spec.errors import SpecError, plain, shown
from testbed.spec.run import SCHEMA, RunSpec, check_schema

MAX_SUMMARY = 64 << 20  # bytes; the losses of a million steps have 20 million
Line = dict[str, Any]  # a line of rankN.jsonl


class Summary(Spec):
    """summary.json. `status` other than "ok" keeps a run out of tables; `reason` says why."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")  # a loss that diverged is a result too

    version: int = Field(default=SCHEMA, alias="schema")
    spec: RunSpec
    status: Literal["ok", "invalid", "failed", "interrupted"]
    reason: str = ""
    substrate: str = ""
    notes: list[str] = []
    network: str = "not measured"
    steps: int = 0  # that count, warm-up left out
    seconds_per_step: float | None = None  # median (every:K: mean) over steps of the mean over ranks
    seconds_spread: tuple[float, float] | None = None  # quartiles of the same
    per_rank_seconds: list[float | None] = []  # mean per rank
    losses: list[float] = []  # per step, mean over ranks
    test_loss: float | None = None
    test_accuracy: float | None = None  # fraction
    per_rank_accuracy: list[float] = []
    sent_per_step: list[float | None] = []  # bytes, per rank
    received_per_step: list[float | None] = []
    counter: str = ""
    gradient_bytes: int | None = None
    replicas_agree: bool | None = None
    environment: dict[str, Any] = {}

    @classmethod
    def read(cls, folder: RunFolder) -> Summary:
        try:
            values = json.loads(read_bounded(folder.summary, MAX_SUMMARY))
            check_schema(values["schema"], str(folder.summary))
            return cls.model_validate(values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SpecError(f"{folder.summary}: damaged ({str(error).splitlines()[0]}). Run it again.") from None


def summarise(folder: RunFolder, spec: RunSpec, **facts: Any) -> Summary:
    """Read every rank's records and reduce them; `facts` are what only the caller knows (status, substrate, ...)."""
    try:
        return _summarise(folder, spec, facts)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(
            f"{folder.path}: its records are damaged ({type(error).__name__}: {plain(str(error))}). Run it again."
        ) from None


def _summarise(folder: RunFolder, spec: RunSpec, facts: dict[str, Any]) -> Summary:
    ranks = [list(read(folder.records(rank))) for rank in range(spec.world)]
    steps = [[r for r in records if r["kind"] == "step"] for records in ranks]
    kept = [[r for r in rank_steps if r["step"] >= spec.warmup] for rank_steps in steps]
    means = [statistics.fmean(row) for row in zip(*([r["total"] for r in k] for k in kept), strict=False)]
    starts = [r for records in ranks for r in records if r["kind"] == "start"]
    notes = [*facts.get("notes", ()), *_restarted(folder, steps)]
    return Summary(
        spec=spec,
        steps=len(means),
        seconds_per_step=centre(spec)(means) if means else None,
        seconds_spread=_quartiles(means),
        per_rank_seconds=[statistics.fmean(r["total"] for r in k) if k else None for k in kept],
        losses=_losses(spec, steps),
        sent_per_step=[_bytes_per_step(k, "sent") for k in kept],
        received_per_step=[_bytes_per_step(k, "received") for k in kept],
        counter=starts[0]["counter"] if starts else "",
        gradient_bytes=starts[0]["gradient_bytes"] if starts else None,
        environment=starts[0]["environment"] if starts else {},
        replicas_agree=_replicas_agree(ranks),
        **_accuracy(ranks),
        **facts | _verdict(ranks, steps, facts["status"]) | {"notes": notes},
    )


def _verdict(ranks: list[list[Line]], steps: list[list[Line]], status: str) -> dict[str, str]:
    """A run is "ok" only if every rank recorded every step once: without one, all after it stand in wrong places.

    A rank without any record is on a disk of its own: who starts ranks by hand may have given them no shared one.
    """
    if status != "ok":
        return {}
    said = [r.get("steps") or 0 for lines in ranks for r in lines if r["kind"] == "end"]
    longest = max([r["step"] + 1 for rows in steps for r in rows] + said, default=0)
    for rank, rows in enumerate(steps):
        wrong = next((k for k, r in enumerate(rows) if r["step"] != k), len(rows))
        if wrong < max(longest, len(rows)) and ranks[rank]:
            found = f"step {shown(rows[wrong]['step'])} is in its place" if wrong < len(rows) else "nothing follows"
            rule = "what is left of a run is no run"
            return {"status": "failed", "reason": f"rank {rank} has no record of step {wrong} ({found}): {rule}"}
    return {}


def _restarted(folder: RunFolder, steps: list[list[Line]]) -> list[str]:
    """Where the last of several attempts began; nothing to say where there was one, or it came to no step."""
    if not any(steps) or not any(folder.attempts(rank) for rank in range(len(steps))):
        return []
    done = max((r["step"] + 1 for rows in steps for r in rows if r.get("attempt") is not None), default=0)
    if done:
        return [f"resumed after step {done}: what went before was done by an earlier attempt"]
    return ["started again from the beginning: no checkpoint was there that all ranks have"]


def centre(spec: RunSpec) -> Callable[[list[float]], float]:
    """The median; but where most steps do not synchronise it would leave out those that do, so there the mean."""
    return statistics.median if spec.mode.every == 1 else statistics.fmean


def _quartiles(values: list[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _losses(spec: RunSpec, steps: list[list[Line]]) -> list[float]:
    """Mean over ranks per step; ranks with larger shares weigh more."""
    weights = [spec.local_batch(rank) / spec.global_batch for rank in range(spec.world)]
    rows = zip(*([r["loss"] for r in rank_steps] for rank_steps in steps), strict=False)
    return [sum(w * loss for w, loss in zip(weights, row, strict=True)) for row in rows]


def _bytes_per_step(kept: list[Line], key: str) -> float | None:
    """Counters are cumulative; from one step's end to the next one's within an epoch, so that tests do not count.

    And within an attempt: the next one's counters began anew, or went on through steps that nobody kept.
    """
    alike = [(a, b) for a, b in itertools.pairwise(kept) if a.get("attempt") == b.get("attempt")]
    pairs = [(a, b) for a, b in alike if a["epoch"] == b["epoch"]] or alike
    if not pairs or kept[0][key] is None:
        return None
    return statistics.fmean(b[key] - a[key] for a, b in pairs)


def _replicas_agree(ranks: list[list[Line]]) -> bool | None:
    """All ranks' last hashes are of one step and equal; None when there is none to compare."""
    last = [next((r for r in reversed(records) if r["kind"] == "hash"), None) for records in ranks]
    if any(r is None for r in last):
        return None
    return len({(r["step"], r["parameters"]) for r in last if r}) == 1


def _accuracy(ranks: list[list[Line]]) -> dict[str, Any]:
    last = [next((r for r in reversed(records) if r["kind"] == "eval"), None) for records in ranks]
    found = [r for r in last if r]
    if not found:
        return {}
    return {
        "test_loss": statistics.fmean(r["loss"] for r in found),
        "test_accuracy": statistics.fmean(r["correct"] / r["images"] for r in found),
        "per_rank_accuracy": [r["correct"] / r["images"] for r in found],
    }
