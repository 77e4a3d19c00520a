"""Summary: what one run folder says in one row, and the table of several."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from testbed.spec.base import Spec
from testbed.spec.errors import SpecError
from testbed.spec.folder import RunFolder
from testbed.spec.records import read
from testbed.spec.run import SCHEMA, RunSpec, check_schema
from testbed.spec.units import format_rate


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
    seconds_per_step: float | None = None  # median over steps of the mean over ranks
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
            values = json.loads(folder.summary.read_text(encoding="utf-8"))
            check_schema(values["schema"], str(folder.summary))
            return cls.model_validate(values)
        except (ValueError, TypeError, KeyError) as error:
            raise SpecError(f"{folder.summary}: damaged ({str(error).splitlines()[0]}). Run it again.") from None


def summarise(folder: RunFolder, spec: RunSpec, **facts: Any) -> Summary:
    """Read every rank's records and reduce them; `facts` are what only the caller knows (status, substrate, ...)."""
    ranks = [list(read(folder.records(rank))) for rank in range(spec.world)]
    steps = [[r for r in records if r["kind"] == "step"] for records in ranks]
    kept = [[r for r in rank_steps if r["step"] >= spec.warmup] for rank_steps in steps]
    means = [statistics.fmean(row) for row in zip(*([r["total"] for r in k] for k in kept), strict=False)]
    starts = [r for records in ranks for r in records if r["kind"] == "start"]
    return Summary(
        spec=spec,
        steps=len(means),
        seconds_per_step=statistics.median(means) if means else None,
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
        **facts,
    )


def _quartiles(values: list[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _losses(spec: RunSpec, steps: list[list[dict[str, Any]]]) -> list[float]:
    """Mean over ranks per step; ranks with larger shares weigh more."""
    weights = [spec.local_batch(rank) / spec.global_batch for rank in range(spec.world)]
    rows = zip(*([r["loss"] for r in rank_steps] for rank_steps in steps), strict=False)
    return [sum(w * loss for w, loss in zip(weights, row, strict=True)) for row in rows]


def _bytes_per_step(kept: list[dict[str, Any]], key: str) -> float | None:
    """Counters are cumulative, so the first kept step is the zero point."""
    if len(kept) < 2 or kept[0][key] is None:
        return None
    return (kept[-1][key] - kept[0][key]) / (len(kept) - 1)


def _replicas_agree(ranks: list[list[dict[str, Any]]]) -> bool | None:
    """All ranks' last hashes are of one step and equal; None when there is none to compare."""
    last = [next((r for r in reversed(records) if r["kind"] == "hash"), None) for records in ranks]
    if any(r is None for r in last):
        return None
    return len({(r["step"], r["parameters"]) for r in last if r}) == 1


def _accuracy(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    last = [next((r for r in reversed(records) if r["kind"] == "eval"), None) for records in ranks]
    found = [r for r in last if r]
    if not found:
        return {}
    return {
        "test_loss": statistics.fmean(r["loss"] for r in found),
        "test_accuracy": statistics.fmean(r["correct"] / r["images"] for r in found),
        "per_rank_accuracy": [r["correct"] / r["images"] for r in found],
    }


HEADER = (
    "mode",
    "s/iter",
    "quartiles",
    "speed-up",
    "test loss",
    "accuracy",
    "MB sent/step (rank 0, others)",
    "replicas agree",
)


def table(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """The rows under HEADER, in the order given; runs that do not count are left out."""
    return [_row(s, _baseline(s, summaries)) for s in summaries if s.status == "ok"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain aligned text that is Markdown as well: it fits a log, a README and a script's split on '|'."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]) + " |"

    rule = "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def left_out(summaries: Sequence[Summary]) -> list[str]:
    """One sentence per run that is not in the table."""
    return [f"{s.spec.name}: {s.status}, {s.reason}" for s in summaries if s.status != "ok"]


def _baseline(summary: Summary, among: Sequence[Summary]) -> Summary | None:
    """The single-node run of the same model, data and global batch."""

    def key(s: Summary) -> tuple[object, ...]:
        return (s.spec.model, s.spec.data.name, s.spec.global_batch, s.spec.dtype, s.substrate)

    return next((s for s in among if s.status == "ok" and not s.spec.mode.distributed and key(s) == key(summary)), None)


def _row(s: Summary, single: Summary | None) -> tuple[str, ...]:
    base = single.seconds_per_step if single else None
    agree = {True: "yes", False: "NO", None: "-"}[s.replicas_agree] if s.spec.mode.distributed else "-"
    return (
        str(s.spec.mode) if s.spec.placement == "before-step" else f"{s.spec.mode} (after step)",
        _number(s.seconds_per_step, ".3f"),
        f"{s.seconds_spread[0]:.3f}-{s.seconds_spread[1]:.3f}" if s.seconds_spread else "-",
        f"{base / s.seconds_per_step:.2f}" if base and s.seconds_per_step else "-",
        _number(s.test_loss, ".3f"),
        "-" if s.test_accuracy is None else f"{100 * s.test_accuracy:.1f} %",
        _traffic(s.sent_per_step),
        agree,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _traffic(sent: list[float | None]) -> str:
    """Megabytes (10^6) per step: rank 0's, then the mean of the others."""
    first, *others = sent or [None]
    known = [s for s in others if s is not None]
    if first is None or not known:
        return "-"
    return f"{first / 1e6:.1f}, {statistics.fmean(known) / 1e6:.1f}"


def caption(summaries: Sequence[Summary]) -> str:
    """What all rows have in common, so that the table can be read alone."""
    if not summaries:
        return ""
    s, spec = summaries[0], summaries[0].spec
    cpus = f"{spec.node.cpus:g} cores" if spec.node.cpus and s.substrate != "process" else "no CPU limit"
    rates = sorted({x.spec.link.rate for x in summaries if x.spec.link.rate} if s.substrate != "process" else set())
    rate = " and ".join(format_rate(r) for r in rates) + " each way" if rates else "unshaped"
    nodes = f"{max(x.spec.nodes for x in summaries)} equal nodes"
    return (
        f"{spec.model} on {spec.data.name}, batch {spec.global_batch} over all ranks, {nodes} "
        f"({cpus}, {spec.threads} thread{'s' * (spec.threads > 1)}), {rate}, on {s.substrate}; "
        f"median of {s.steps} steps after {spec.warmup} left out"
    )
