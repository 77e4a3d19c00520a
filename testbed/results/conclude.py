"""The end of a run: summary.json from the ranks' records, and the root cause of a failure.

`conclude` is the only writer of summary.json. The controller calls it; without a controller, rank 0 does. If the
controller has gone, `testbed collect` and `fab collect` call it by `conclude_without_controller`.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from testbed.results.faults import TimedStep, read_history, steps_under_fault
from testbed.results.folder import RunFolder, read_bounded, write_whole
from testbed.results.observations import Finding, Parameters, Setup, Swap, Unseen
from testbed.results.receipt import Receipt
from testbed.results.records import End, Error, Eval, Hash, Record, Start, Step, read
from testbed.results.validity import MachineLoad, impossible, machine_loads, overloaded
from testbed.spec.base import Spec, damage
from testbed.spec.disk import full_disk, nearly_full, os_failure
from testbed.spec.errors import (
    DiskFull,
    NetworkInvalid,
    PeerLost,
    RankFailed,
    ReplicasDiffer,
    SpecError,
    TestbedError,
    UsageError,
    one_line,
)
from testbed.spec.run import SCHEMA, RunSpec, check_schema

SAMPLED_SHARE = 0.01  # of a step's time; a step in which the observer's samples took more is counted separately
TOO_FAST = "This is faster than the requested links allow: run it again"
OF_OTHER_CLOCKS = ("hosts", "slurm", "uml")  # substrates of summaries that do not say whether there is one clock
MAX_SUMMARY_BYTES = 64 << 20  # the losses of a million steps take 20 million bytes
Status = Literal["ok", "invalid", "failed", "interrupted"]


class Summary(Spec):
    """summary.json. `status` other than "ok" keeps a run out of tables; `reason` says why."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")  # a loss may be inf or nan

    version: int = Field(default=SCHEMA, alias="schema")
    spec: RunSpec
    status: Status
    reason: str = ""
    substrate: str = ""
    one_clock: bool = True  # all nodes have the controller's monotonic clock: they use its kernel
    notes: list[str] = []
    network: str = "not measured"
    steps: int = 0  # measured steps, without warm-up and without those under a fault
    left_out_steps: int = 0  # steps after warm-up that were under an injected fault
    left_out_reason: str = ""  # "rate fault", "cut and rate faults"
    sampled_steps: int = 0  # steps of a user's script in which the observer took samples; not counted in `steps`
    sampled_seconds: float | None = None  # median (every:K: mean) of the seconds of these steps
    images: list[float] = []  # of a user's script: images per step that each rank fetched; 0 if none was seen
    # of a user's script, by rank: the images of a step, and those of the last step of a pass if their number differs;
    # None: the numbers of other steps differ too
    batches: list[list[int] | None] = []
    threads: list[int] = []  # of a user's script, by rank: torch's threads as the script has set them
    seconds_per_step: float | None = None  # median (every:K: mean) over steps of the mean over ranks
    seconds_spread: tuple[float, float] | None = None  # quartiles over steps of the mean over ranks
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
    copies: int = 0  # of a single node's job: how many ran beside it to their end (control/substrates/copies.py)
    machines: list[MachineLoad] = []  # how busy each machine was with other work; empty if unknown
    environment: dict[str, Any] = {}
    findings: list[Finding] = []  # about a user's script: errors, then costs from the largest down, then notes

    @classmethod
    def read(cls, folder: RunFolder) -> Summary:
        """Read summary.json. Raises SpecError if it is damaged, SchemaError if another version wrote it."""
        try:
            values = json.loads(read_bounded(folder.summary, MAX_SUMMARY_BYTES))
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{folder.summary}: damaged, not JSON ({error}). Run it again.") from None
        if not isinstance(values, dict) or "schema" not in values:
            raise SpecError(f"{folder.summary}: damaged, it holds no summary. Run it again.")
        check_schema(values["schema"], str(folder.summary))
        if "one_clock" not in values:  # an earlier version wrote this file
            values["one_clock"] = values.get("substrate") not in OF_OTHER_CLOCKS
        summary = cls.load_written(values, folder.summary)
        if "left_out_steps" in values or summary.status != "ok" or not summary.spec.faults:
            return summary
        # The file is from an earlier version, which counted steps under a fault in the times.
        steps = [[r for r in read(folder.records(rank)) if isinstance(r, Step)] for rank in range(summary.spec.world)]
        return summary.model_copy(update=_timing(folder, summary.spec, steps, summary.one_clock))


def conclude(
    folder: RunFolder,
    spec: RunSpec,
    *,
    status: Status,
    reason: str = "",
    substrate: str,
    one_clock: bool = True,
    notes: Sequence[str] = (),
    network: str = "not measured",
    findings: Sequence[Finding] = (),
) -> Summary:
    """Write summary.json and return the summary. Call this last: a folder with a summary is a run that ended.

    Raises TestbedError if the file cannot be written, SpecError if the records are damaged.
    """
    try:
        folder.tidy()
        facts: dict[str, Any] = {"status": status, "reason": reason, "substrate": substrate, "one_clock": one_clock}
        facts |= {"notes": list(notes), "network": network, "findings": list(findings)}
        summary = summarise(folder, spec, **facts)
        write_whole(folder.summary, summary.model_dump_json(by_alias=True, indent=1))
    except OSError as error:
        raise os_failure(error, folder.summary) from None
    return summary


def summarise(folder: RunFolder, spec: RunSpec, **facts: Any) -> Summary:
    """Reduce all ranks' records to a Summary. `facts` are the fields that the caller sets (status, ...).

    Raises SpecError if the records are damaged.
    """
    try:
        return _summarise(folder, spec, facts)
    except ValidationError as error:
        raise SpecError(f"{folder.path}: its records are damaged ({damage(error, Summary)}). Run it again.") from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(
            f"{folder.path}: its records are damaged ({type(error).__name__}: {one_line(str(error))}). Run it again."
        ) from None


def _summarise(folder: RunFolder, spec: RunSpec, facts: dict[str, Any]) -> Summary:
    ranks = [list(read(folder.records(rank))) for rank in range(spec.world)]
    copies = [list(read(copy.records(0))) for copy in folder.copies()]
    steps = [[r for r in records if isinstance(r, Step)] for records in ranks]
    starts = [r for records in ranks for r in records if isinstance(r, Start)]
    notes = [*facts.get("notes", ()), *_restarted(folder, steps), *[s.chosen for s in starts[:1] if s.chosen]]
    notes += _script_notes(spec, ranks, steps) if spec.script else []
    return Summary(
        spec=spec,
        losses=_losses(spec, steps),
        counter=starts[0].counter if starts else "",
        gradient_bytes=starts[0].gradient_bytes if starts else None,
        environment=starts[0].environment if starts else {},
        replicas_agree=_replicas_agree(ranks) if spec.script is None else _script_replicas_agree(ranks),
        machines=machine_loads([*ranks, *copies]),
        copies=sum(map(_ended, copies)),
        threads=[r.threads for records in ranks for r in records if isinstance(r, Setup) and r.threads],
        **_accuracy(ranks),
        **_timing(folder, spec, steps, facts.get("one_clock", True)),
        **facts
        | (_failed_or_invalid(spec, ranks, steps, facts["status"]) or _unfinished_copies(copies, facts["status"]))
        | {"notes": notes},
    )


def _timing(folder: RunFolder, spec: RunSpec, steps: list[list[Step]], one_clock: bool) -> dict[str, Any]:
    """Seconds and bytes per step, of the steps after warm-up that no injected fault overlapped."""
    faults = faulted_steps(folder, spec, [[timed(r) for r in rows] for rows in steps], one_clock)
    counted = [[r for r in rows if r.step >= spec.warmup] for rows in steps]
    calm = [[r for r in rows if r.step not in faults] for rows in counted]
    sampled = sampled_steps([[(r.step, r.observing, r.total) for r in rows] for rows in calm])
    kept = [[r for r in rows if r.step not in sampled] for rows in calm]
    means = [statistics.fmean(row) for row in zip(*([r.total for r in k] for k in kept), strict=False)]
    left_out = [numbers[0] for numbers in zip(*([r.step for r in rows] for rows in counted), strict=False)]
    left_out = [number for number in left_out if number in faults]
    return {
        "steps": len(means),
        "left_out_steps": len(left_out),
        "left_out_reason": fault_names(kind for number in left_out for kind in faults[number]),
        **_sampled(spec, [[r.total for r in rows if r.step in sampled] for rows in calm]),
        **({"images": [_mean_images(rows) for rows in kept], "batches": _batches(steps)} if spec.script else {}),
        "seconds_per_step": centre(spec)(means) if means else None,
        "seconds_spread": _quartiles(means),
        "per_rank_seconds": [statistics.fmean(r.total for r in k) if k else None for k in kept],
        "sent_per_step": [_bytes_per_step(k, lambda step: step.sent) for k in calm],
        "received_per_step": [_bytes_per_step(k, lambda step: step.received) for k in calm],
    }


def sampled_steps(ranks: Sequence[Sequence[tuple[int, float, float]]]) -> set[int]:
    """Return the steps of a user's script that the observer's samples made longer; empty if no other step is left.

    A row of a rank is (number of the step, seconds of samples, seconds of the step).
    """
    sampled = {number for rows in ranks for number, observing, total in rows if observing > SAMPLED_SHARE * total}
    return sampled if {number for rows in ranks for number, *_ in rows} - sampled else set()


def _sampled(spec: RunSpec, totals: list[list[float]]) -> dict[str, Any]:
    means = [statistics.fmean(row) for row in zip(*totals, strict=False)]
    return {"sampled_steps": len(means), "sampled_seconds": centre(spec)(means)} if means else {}


def _mean_images(rows: Sequence[Step]) -> float:
    return statistics.fmean(r.images for r in rows) if rows else 0.0


def _batches(ranks: Sequence[Sequence[Step]]) -> list[list[int] | None]:
    """Return for each rank the usual number of images of a step, and that of the last step of a pass if it differs.

    None for a rank whose other steps differ too.
    """
    found: list[list[int] | None] = []
    for rows in ranks:
        sizes = Counter(row.images for row in rows)
        usual = sizes.most_common(1)[0][0] if sizes else 0
        ends = [a.images for a, b in itertools.zip_longest(rows, rows[1:]) if b is None or b.epoch > a.epoch]
        others = {size: count for size, count in sizes.items() if size != usual}
        if any(ends.count(size) < count for size, count in others.items()) or len(others) > 1:
            found.append(None)
        else:
            found.append([usual, *others])
    return found


def timed(step: Step) -> TimedStep:
    return TimedStep(step.step, step.at, step.at + step.total, step.attempt)


def faulted_steps(
    folder: RunFolder, spec: RunSpec, ranks: Sequence[Sequence[TimedStep]], one_clock: bool
) -> dict[int, list[str]]:
    """The steps of a run that were under an injected fault, by number, with the kinds of these faults."""
    return steps_under_fault(read_history(folder), ranks, one_clock) if spec.faults else {}


def fault_names(kinds: Iterable[str]) -> str:
    """Return the kinds in words: `rate fault`, `cut and rate faults`; empty if there are none."""
    names = sorted(set(kinds))
    return f"{' and '.join(names)} fault{'s' * (len(names) > 1)}" if names else ""


def _failed_or_invalid(
    spec: RunSpec, ranks: list[list[Record]], steps: list[list[Step]], status: str
) -> dict[str, str]:
    """Return {} if the records show nothing wrong; else the status, "failed" or "invalid", and the reason.

    Every rank must have recorded every step once and in order, no rank may be faster than its link allows, and ranks
    with emulated compute may not use too much of a machine. If a step of a rank were missing, its later steps would be
    compared with the wrong steps of other ranks. A rank without any record is accepted: ranks that a launcher starts
    may have no shared disk, and then rank 0 has only its own file.
    """
    if status != "ok":
        return {}
    recorded = [r.steps for records in ranks for r in records if isinstance(r, End)]
    longest = max([r.step + 1 for rows in steps for r in rows] + recorded, default=0)
    for rank, rows in enumerate(steps):
        wrong = next((k for k, r in enumerate(rows) if r.step != k), len(rows))
        expected = max(longest, len(rows)) if spec.script is None else len(rows)  # a script may do any number of steps
        if wrong < expected and ranks[rank]:
            found = f"step {rows[wrong].step} is in its place" if wrong < len(rows) else "nothing follows"
            rule = "all steps must be recorded"
            return {"status": "failed", "reason": f"rank {rank} has no record of step {wrong} ({found}): {rule}"}
    if too_fast := impossible(spec, ranks):
        return {"status": "invalid", "reason": f"{too_fast}. {TOO_FAST}"}
    if spec.emulated and (too_much := overloaded(machine_loads(ranks))):
        return {
            "status": "invalid",
            "reason": f"{too_much}. Run it with a larger dilation (now {spec.dilation or 1:g})",
        }
    return {}


def _ended(records: Sequence[Record]) -> bool:
    return any(isinstance(r, End) for r in records)


def _unfinished_copies(copies: Sequence[list[Record]], status: str) -> dict[str, str]:
    """Return {} if all copies of a single node's job ran to their end; else the status "invalid" and the reason."""
    lost = sum(not _ended(records) for records in copies)
    if status != "ok" or not lost:
        return {}
    share = (
        f"so the node had more than 1/{len(copies) + 1} of the machine. See rank0.log in copy1/, ..., and run it again"
    )
    return {
        "status": "invalid",
        "reason": f"{lost} of {len(copies)} copies of the job did not run to their end, {share}",
    }


def _restarted(folder: RunFolder, steps: list[list[Step]]) -> list[str]:
    """Return a note on where the last of several attempts began; none if there was one attempt, or no step."""
    if not any(steps) or not any(folder.attempts(rank) for rank in range(len(steps))):
        return []
    done = max((r.step + 1 for rows in steps for r in rows if r.attempt is not None), default=0)
    if done:
        return [f"resumed after step {done}: the steps before it were done by an earlier attempt"]
    return ["started again from the beginning: there was no checkpoint that all ranks have"]


def centre(spec: RunSpec) -> Callable[[list[float]], float]:
    """Return the median, or the mean for every:K: a median would ignore the few steps that synchronise."""
    return statistics.median if spec.mode.every == 1 else statistics.fmean


def _quartiles(values: list[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _losses(spec: RunSpec, steps: list[list[Step]]) -> list[float]:
    """Return the mean loss over ranks of each step, weighted by the ranks' images; empty if there is no loss.

    With emulated compute a loss has no meaning.
    """
    if spec.emulated:
        return []
    if spec.script is not None:
        losses = [_weighted_loss(row) for row in zip(*steps, strict=False)]
        return losses if any(losses) else []  # no loss was seen
    weights = [spec.local_batch(rank) / spec.global_batch for rank in range(spec.world)]
    rows = zip(*([r.loss for r in rank_steps] for rank_steps in steps), strict=False)
    return [sum(w * loss for w, loss in zip(weights, row, strict=True)) for row in rows]


def _weighted_loss(row: Sequence[Step]) -> float:
    """Return the loss of one step of a script, weighted by the observed images; the plain mean if a rank has none."""
    images = [step.images for step in row]
    weights = images if all(images) else [1] * len(row)
    return sum(w * step.loss for w, step in zip(weights, row, strict=True)) / sum(weights)


def _bytes_per_step(kept: list[Step], counter: Callable[[Step], int | None]) -> float | None:
    """Return the mean difference of a cumulative counter between the ends of two successive steps; None if unknown.

    Both steps belong to one epoch, so that the traffic of the test is not counted, and to one attempt, because a
    restarted rank counts from 0 again.
    """
    alike = [(a, b) for a, b in itertools.pairwise(kept) if a.attempt == b.attempt and b.step == a.step + 1]
    pairs = [(a, b) for a, b in alike if a.epoch == b.epoch] or alike
    counts = [(counter(a), counter(b)) for a, b in pairs]
    known = [b - a for a, b in counts if a is not None and b is not None]
    return statistics.fmean(known) if known and len(known) == len(pairs) else None


def _replicas_agree(ranks: list[list[Record]]) -> bool | None:
    """Return True if all ranks' last hashes are equal and of the same step; None if a rank has no hash."""
    last = [next((r for r in reversed(records) if isinstance(r, Hash)), None) for records in ranks]
    if any(r is None for r in last):
        return None
    return len({(r.step, r.parameters) for r in last if r}) == 1


def _script_replicas_agree(ranks: list[list[Record]]) -> bool | None:
    """Return True if the parameters of all ranks were equal at the last step at which all ranks sampled them.

    Each optimizer of the script has its own hashes. None if there is no such step: e.g. ranks hold shards (FSDP), or
    the nodes are not one process group, so that there are no replicas.
    """
    if _script_group(ranks):
        return None
    found: list[dict[tuple[str, int], str]] = []
    for records in ranks:
        hashes = [
            r for r in records if isinstance(r, Parameters) and r.moment == "step" and not r.detail.get("sharded")
        ]
        found.append({(str(r.detail.get("optimizer", 0)), r.step): r.hash for r in hashes})
    common = set(found[0]).intersection(*found[1:]) if found else set()
    last = {which: max(step for other, step in common if other == which) for which, _ in common}
    if not last or len(ranks) < 2:
        return None
    return all(len({hashes[each] for hashes in found}) == 1 for each in last.items())


def _script_group(ranks: list[list[Record]]) -> list[str]:
    """Return why the nodes are not the ranks of one process group; empty if they are."""
    starts = [r for records in ranks for r in records if isinstance(r, Start)]
    way_out = (
        "Pass {rank}, {world}, {master} and {port} to the script, or read RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT in it"
    )
    more = max((r.processes for records in ranks for r in records if isinstance(r, End)), default=1)
    if more > 1:
        return [
            f"{more} processes trained on one node, and only the first is in this table. Start one per node. {way_out}"
        ]
    if len(ranks) > 1 and any(start.world == 1 for start in starts):
        return [f"it made no process group of {len(ranks)}: every node trains alone. {way_out}"]
    if starts and sorted(start.rank for start in starts) != list(range(len(ranks))):
        own = ", ".join(f"{start.rank} of {start.world}" for start in starts)
        return [f"the nodes are not the ranks of one process group: the script's own ranks are {own}. {way_out}"]
    return []


def _script_notes(spec: RunSpec, ranks: list[list[Record]], steps: list[list[Step]]) -> list[str]:
    """Return notes for the table of a script: ranks without a common group, unequal numbers of steps, unseen parts."""
    assert spec.script is not None
    counts = [len(rows) for rows in steps]
    notes = [f"{spec.script.name}: {note}" for note in _script_group(ranks)]
    if counts and min(counts) < max(counts):
        rule = f"the {min(counts)} that all ranks have are compared"
        notes.append(f"{spec.script.name}: ranks did {min(counts)} to {max(counts)} steps; {rule}")
    unseen: dict[str, list[int]] = {}
    for rank, records in enumerate(ranks):
        for record in (r for r in records if isinstance(r, Unseen)):
            unseen.setdefault(f"{record.seam} ({record.error})", []).append(rank)
    for what, where in unseen.items():
        on = ", ".join(f"{rank}" for rank in dict.fromkeys(where))
        notes.append(one_line(f"{spec.script.name}: not seen on rank {on}: {what}"))
    chosen = (r.detail.get("chosen") for records in ranks[:1] for r in records if isinstance(r, Swap))
    return notes + [one_line(f"{spec.script.name}: {why}") for why in chosen if why]


def _accuracy(ranks: list[list[Record]]) -> dict[str, Any]:
    last = [next((r for r in reversed(records) if isinstance(r, Eval)), None) for records in ranks]
    found = [r for r in last if r]
    if not found:
        return {}
    return {
        "test_loss": statistics.fmean(r.loss for r in found),
        "test_accuracy": statistics.fmean(r.correct / r.images for r in found),
        "per_rank_accuracy": [r.correct / r.images for r in found],
    }


# --- the root cause of a failed run: which rank failed first, from exit codes and error records ----------------------

NO_INTERNET = (
    " Nodes have no internet: put what the script needs into its folder; `testbed data get cifar10` or"
    " `testbed data get mnist`, called there, provides these data sets."
)
_LOOKED_OUTSIDE = re.compile(
    "name resolution|service not known|network is unreachable|error downloading|urlerror", re.IGNORECASE
)
_NODE = re.compile(r"rank (\d{1,4}) \(node\1\)", re.ASCII)


def root_cause(
    codes: Sequence[int | None],
    error_records: Sequence[Mapping[str, Any] | None],
    *,
    ended: Collection[int] = (),
    last_steps: Sequence[int],
    nodes: Sequence[str],
    folder: RunFolder,
    ended_at: Sequence[float] = (),
) -> TestbedError:
    """Return the error that names the failed rank. All sequences are in rank order.

    A code is None for a rank that has not ended, and negative for a signal. `ended` are ranks that have ended with an
    unknown code: without a controller, rank 0 detects only that their connections closed. `last_steps` are the last
    recorded steps (-1: none), `nodes` the names in messages. The rules are applied in this order: a rank that ended for
    its own reason; the rank that most other ranks report as lost; a rank whose code is unknown.

    Ranks of a user's own script have no watchdog and report no lost rank. For them `ended_at` has the times at which
    they ended, infinite for a rank that still runs. The first rank that ended badly is the failed one.
    """
    return _RootCause(codes, error_records, ended, last_steps, nodes, folder, ended_at).find()


def conclude_without_controller(
    folder: RunFolder,
    spec: RunSpec,
    *,
    codes: Sequence[int | None],
    nodes: Sequence[str],
    substrate: str,
    note: str,
) -> Summary:
    """Write the summary of a run whose controller has gone, from the ranks' files. It is ok if all ranks finished."""
    records = [list(read(folder.records(rank))) for rank in range(spec.world)]
    reasons = []
    if any(codes):
        cause = root_cause(
            codes,
            [next((vars(r) for r in reversed(lines) if isinstance(r, Error)), None) for lines in records],
            last_steps=[max((r.step for r in lines if isinstance(r, Step)), default=-1) for lines in records],
            nodes=nodes,
            folder=folder,
        )
        reasons.append(str(cause))
    unfinished = [rank for rank, lines in enumerate(records) if not any(isinstance(r, End) for r in lines)]
    reasons += [f"rank {rank} did not finish, or its records are not here" for rank in unfinished]
    return conclude(
        folder,
        spec,
        status="failed" if reasons else "ok",
        reason="; ".join(reasons),
        substrate=substrate,
        one_clock=False,  # only the nodes of a cluster train on without their controller
        notes=[note],
        network=Receipt.read(folder.receipt).sentence() if folder.receipt.exists() else "not measured",
    )


def reported_rank(code: int | None, error_record: Mapping[str, Any] | None) -> int | None:
    """Return the rank that a rank with this exit code and error record reports as lost; None if it reports none."""
    return error_record.get("failed_rank") if error_record and code == PeerLost.exit_code else None


class _RootCause:
    """The arguments of `root_cause`, which all of its methods use."""

    def __init__(
        self,
        codes: Sequence[int | None],
        errors: Sequence[Mapping[str, Any] | None],
        ended: Collection[int],
        last_steps: Sequence[int],
        nodes: Sequence[str],
        folder: RunFolder,
        ended_at: Sequence[float] = (),
    ) -> None:
        self.codes, self.errors, self.ended, self.ended_at = codes, errors, ended, ended_at
        self.last_steps, self.nodes, self.folder = last_steps, nodes, folder
        # For each rank the rank that it reports as lost; None if it reports none.
        self.reported = [reported_rank(code, error) for code, error in zip(codes, errors, strict=True)]

    def find(self) -> TestbedError:
        """Return the error by the first rule that applies."""
        reports = Counter(rank for rank in self.reported if rank is not None)
        own_reason = [k for k, code in enumerate(self.codes) if code not in (None, 0, PeerLost.exit_code)]
        if self.ended_at:
            return self._script(own_reason)
        if own_reason:
            return self._own_reason(max(own_reason, key=lambda k: (reports[k], -k)))
        if self.reported == [1, 0]:  # no third rank's report shows which end of the link failed
            since = _since(min(self.last_steps), "their")
            logs = f"{self.folder.log(0)} and {self.folder.log(1)}"
            return RankFailed(f"{self._label(0)} and {self._label(1)} lost each other {since}. See {logs}")
        unknown = [k for k, code in enumerate(self.codes) if code is None]
        if reports:
            most = max(reports.values())
            candidates = (k for k in reports if reports[k] == most)
            return self._lost(min(candidates, key=lambda k: (k not in unknown, self.last_steps[k], k)))
        if unknown:
            return self._lost(min(unknown, key=lambda k: (k not in self.ended, self.last_steps[k])))
        return self._nobody()

    def _script(self, own_reason: Sequence[int]) -> TestbedError:
        """Return the error for the first rank of a script that ended badly, or that ended with 0 before the others."""
        bad = own_reason or [k for k, code in enumerate(self.codes) if code]
        first = min(bad, key=lambda k: self.ended_at[k])
        early = [k for k, code in enumerate(self.codes) if code == 0 and self.ended_at[k] < self.ended_at[first]]
        if early and not own_reason:
            return self._lost(min(early, key=lambda k: self.ended_at[k]))
        return self._own_reason(first)

    def _nobody(self) -> RankFailed:
        """Return the error if no lost rank can be named, e.g. because all ranks wait in a user's method."""
        rank = next(k for k, code in enumerate(self.codes) if code)
        words = (self.errors[rank] or {}).get("message", f"rank {rank} lost another rank, and it is not known which")
        return RankFailed(f"{self._with_node_names(words).rstrip('.')}. See {self.folder.log(rank)}")

    def _lost(self, rank: int) -> RankFailed:
        """Return the error for a rank that is silent, ended with an unknown code, or could not reach the others."""
        since = _since(self.last_steps[rank])
        if self.codes[rank] == 0:
            how = f"ended with code 0 {self._when(rank)}, although the run was not over"
        elif self.codes[rank] is not None:
            how = f"was cut off {since}"
        else:
            how = f"ended {self._when(rank)}" if rank in self.ended else f"is silent {since}"
        seen = next((f" ({error['message']})" for error in self._reports_on(rank)), "")
        lost = _names(k for k, code in enumerate(self.codes) if k != rank and code == PeerLost.exit_code)
        sentence = f"{self._label(rank)} {how}; {lost} lost it{self._with_node_names(seen)}"
        return RankFailed(f"{sentence}. See {self.folder.log(rank)}")

    def _own_reason(self, rank: int) -> TestbedError:
        code, error = self.codes[rank], self.errors[rank]
        known: list[type[TestbedError]] = [UsageError, ReplicasDiffer, NetworkInvalid]
        kind = next((each for each in known if each.exit_code == code), RankFailed)
        if kind is UsageError and error:
            return UsageError(error["message"])
        words = error or next(iter(self._reports_on(rank)), None)
        quoted = words is not None and (error is not None or (code or 0) > 0)
        said = words["message"].rstrip(".") if words is not None and quoted else ""  # empty: a script printed nothing
        message = f": {said}" if said else ""
        if code == DiskFull.exit_code and nearly_full(self.folder.path):  # the rank could perhaps not record the error
            message = f": {full_disk(self.folder.path).rstrip('.')}"
        own_code = error.get("script_code") if error else None
        how = _how_it_ended(code if own_code is None else own_code)
        sentence = f"{self._label(rank)} {how} {self._when(rank)}{self._with_node_names(message)}"
        way_out = NO_INTERNET if own_code is not None and _LOOKED_OUTSIDE.search(said) else ""
        return kind(f"{sentence}.{self._others(rank)}{way_out} See {self.folder.log(rank)}")

    def _others(self, rank: int) -> str:
        """Return sentences about the other ranks: those that lost this rank, and those that ended for other reasons."""
        rest = [(k, code) for k, code in enumerate(self.codes) if k != rank and code not in (None, 0)]
        lost = [k for k, code in rest if code == PeerLost.exit_code]
        own = [(error or {}).get("script_code") for error in self.errors]
        alike = [
            f"rank {k} {_how_it_ended(code if own[k] is None else own[k])}"
            for k, code in rest
            if code != PeerLost.exit_code
        ]
        return (f" Then {_names(lost)} lost it." if lost else "") + (f" Also {', '.join(alike)}." if alike else "")

    def _reports_on(self, rank: int) -> list[Mapping[str, Any]]:
        return [error for error, lost in zip(self.errors, self.reported, strict=True) if error and lost == rank]

    def _when(self, rank: int) -> str:
        """Return when a rank ended, in words."""
        step = self.last_steps[rank]
        return f"after step {step + 1}" if step >= 0 else "before its first step"

    def _label(self, rank: int) -> str:
        return f"rank {rank} ({self.nodes[rank]})"

    def _with_node_names(self, message: str) -> str:
        """Replace the node in "rank 1 (node1)", which ranks write, by the node's name in the inventory."""

        def name(found: re.Match[str]) -> str:
            return self._label(int(found[1])) if int(found[1]) < len(self.nodes) else found[0]

        return _NODE.sub(name, message)


def _since(last_step: int, whose: str = "its") -> str:
    """Return since when a rank is silent, in words; `last_step` is its last recorded step, -1 if there is none."""
    return f"since step {last_step + 1}" if last_step >= 0 else f"since {whose} start, before the first step"


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {k}" for k in ranks) or "the others"


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        known = -code in {each.value for each in signal.Signals}
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    if code == DiskFull.exit_code:
        return "could not write any more"
    return f"ended with code {code}"
