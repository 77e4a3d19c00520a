"""Find errors and avoidable costs of a user's script. Each rule is one function over the records of all ranks.

A rule returns a Finding or None. Severity `error`: the script does not train the model that it seems to train. `cost`:
the script loses seconds in each step. `note`: anything else. A rule returns a finding only if the records show it, and
the finding says what would refute it. Words are those of the page: local gradients are those before synchronisation,
given gradients those that the optimizer gets.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from testbed.report.stats import seconds
from testbed.results.folder import MAX_RECORDS_BYTES, RunFolder, check_size
from testbed.results.gradients import EXACT, Fit, gradient_fits, near, optimizer_of
from testbed.results.observations import (
    SEVERITIES,
    Batch,
    Call,
    Calls,
    Finding,
    Gradients,
    Parameters,
    Pass,
    Setup,
    Swap,
)
from testbed.results.records import End, Record, Start, Step, read
from testbed.results.timeline import CONTINUED
from testbed.results.timeline import Observed as Collective
from testbed.spec.errors import one_line
from testbed.spec.run import RunSpec
from testbed.spec.units import approximate_size, covered_length, format_rate

MIN_SAMPLES = 2  # samples that must agree for a finding, because a single one may be a coincidence
MIN_CONSTANT = 3  # samples that must have one factor: of two, clipping by hand might have left nearly the same
MIN_STEPS = 4  # fewest steps for a finding with a time
CARRIED = 0.4  # share of the gradients' bytes from which on a collective carries gradients; a codec may halve the bytes
TINY_BYTES = 64 << 10  # a collective up to this size takes as long as an empty one on most networks
MANY = 10  # collectives of one line in one step
SMALL_BYTES = 4 << 10  # largest metric
EVERY_STEP = 0.9  # calls per step from which on a call counts as one of every step
MATTERS = 0.01  # share of a step from which on a finding is a cost
TINY_MATTERS = 0.05  # the same for small collectives and for missing overlap
ALONE_SHARE = 0.25  # of a step: least work of one rank alone
ALONE_S = 0.005  # shorter work cannot be distinguished from delays of a busy machine
ALONE_STANDS_OUT = 3  # least ratio of the work of one rank alone to the usual difference between ranks in other steps
ALONE_TIMES = 3  # fewest steps in which a rank works alone
SAME_RANK = 0.8  # least share of such steps on the same rank
SLOW_NODE = 1.25  # backward of a rank over that of the others, from which on the node is slow and not the script
FIRST_BUCKET_BYTES = 1 << 20  # first bucket of DDP; a model with one bucket sends nothing before backward ends
MAX_HIDDEN = 0.05  # largest hidden share of communication that counts as no overlap
DDP = "DistributedDataParallel"
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError)  # in forged records

R = TypeVar("R")


def as_line(finding: Finding) -> str:
    """Return a finding as one line of text, e.g. for a terminal."""
    where = f" ({finding.site})" if finding.site else ""
    cost = f" It costs {seconds(finding.seconds)} a step." if finding.seconds else ""
    return one_line(f"{finding.severity}: {finding.title}{where}{cost} {finding.fix}")


@dataclass(frozen=True)
class Group:
    """The processes that are compared: the ranks of one process group, or of all nodes without one."""

    records: Mapping[int, Sequence[Record]]  # by rank of the process group; by node if each node has one process
    nodes: Mapping[int, int]  # rank -> node
    alone: str = ""  # why ranks of other nodes are not compared; empty if all are


def group_of(by_node: Mapping[int, Sequence[Record]], forked: Mapping[int, Sequence[Sequence[Record]]]) -> Group:
    """Return the first complete process group: one process per node, all processes, or those of one node.

    `forked`: by node the records of the processes that trained beside the first one.
    """
    seen = [(node, own) for node in sorted(by_node) for own in (by_node[node], *forked.get(node, ()))]
    joined = [(node, setup, own) for node, own in seen for setup in _of(own, Setup)[-1:] if setup.world > 1]
    several = len(seen) > len(by_node) or any(end.processes > 1 for own in by_node.values() for end in _of(own, End))
    if not joined or (not several and _whole([setup for _, setup, _ in joined], len(by_node))):
        return Group(by_node, {node: node for node in by_node})
    if _whole([setup for _, setup, _ in joined], len(seen)):
        return Group({setup.rank: own for _, setup, own in joined}, {setup.rank: node for node, setup, _ in joined})
    for node in sorted(by_node):
        here = [(setup, own) for each, setup, own in joined if each == node]
        if len(here) > 1 and _whole([setup for setup, _ in here], len(here)):
            why = f"the {len(here)} ranks that node {node} has forked are a process group of their own"
            why = why if len(by_node) > 1 else ""
            return Group({setup.rank: own for setup, own in here}, {setup.rank: node for setup, _ in here}, why)
    first = min(by_node)
    named = ", ".join(f"rank {setup.rank} of {setup.world} on node {node}" for node, setup, _ in joined[:8])
    return Group({first: by_node[first]}, {first: first}, f"not all ranks of a process group were seen, only {named}")


def _of(records: Sequence[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _whole(setups: Sequence[Setup], count: int) -> bool:
    """Return True if these are all ranks of one process group of this size."""
    return {setup.world for setup in setups} == {count} and sorted(s.rank for s in setups) == list(range(count))


@dataclass(frozen=True)
class Observed:
    """The records of all ranks, as the rules need them. Only records that all ranks have are compared."""

    group: Group
    spec: RunSpec

    @property
    def records(self) -> Mapping[int, Sequence[Record]]:
        return self.group.records

    @property
    def ranks(self) -> list[int]:
        return sorted(self.records)

    def each(self, kind: type[R]) -> list[list[R]]:
        """Return the records of one kind, one list for each rank."""
        return [[record for record in self.records[rank] if isinstance(record, kind)] for rank in self.ranks]

    @cached_property
    def setups(self) -> list[Setup]:
        return [found[-1] for found in self.each(Setup) if found]

    def uses(self, wrapper: str) -> dict[str, Any] | None:
        """Return the options of a wrapper such as DDP; None if the script does not use the wrapper."""
        return next((setup.wrappers[wrapper] for setup in self.setups if wrapper in setup.wrappers), None)

    @cached_property
    def fits(self) -> list[Fit]:
        return gradient_fits(self.records)

    def decided(self) -> list[tuple[int, str, list[Fit]]]:
        """Return for each optimizer its number, the kind of its conclusive samples, and the samples of this kind.

        Of samples of several kinds those that are a sum or divided twice decide, if there are MIN_SAMPLES of them. Else
        the kind is "mixed": a script may synchronise at times only, weigh uneven batches, or clip by varying factors.
        """
        found: list[tuple[int, str, list[Fit]]] = []
        for number in sorted({fit.optimizer for fit in self.fits}):
            own = [fit for fit in self.fits if fit.optimizer == number]
            own = [fit for fit in own if fit.kind not in ("zero", "equal", "unseen")]
            kinds = Counter(fit.kind for fit in own)
            if not kinds:
                continue
            wrong = [kind for kind in ("sum", "divided") if kinds[kind] >= MIN_SAMPLES]
            decides = wrong[0] if wrong and not kinds["scaled"] else "mixed"
            kind = next(iter(kinds)) if len(kinds) == 1 else decides
            found.append((number, kind, [fit for fit in own if kind in ("mixed", fit.kind)]))
        return found

    @cached_property
    def gradients(self) -> dict[tuple[int, int], list[Gradients]]:
        """(optimizer, update) -> the samples of all ranks."""
        return _common(
            [{(optimizer_of(record), record.step): record for record in own} for own in self.each(Gradients)]
        )

    @cached_property
    def parameters(self) -> dict[tuple[int, str, int], list[Parameters]]:
        """(optimizer, moment, update) -> the hashes of all ranks, if the ranks have replicas."""
        found = _common(
            [
                {(int(record.detail.get("optimizer", 0)), record.moment, record.step): record for record in own}
                for own in self.each(Parameters)
            ]
        )
        return {key: own for key, own in found.items() if not self.sharded and _replicas(own)}

    @cached_property
    def replaced(self) -> bool:
        """True if a mode of the testbed replaced the script's synchronisation (--instead)."""
        return any(self.each(Swap))

    @cached_property
    def sharded(self) -> bool:
        """True if each rank has only a part of the parameters, as with FSDP. Parameters are not compared then."""
        rows = [row for own in self.calls for row in own]
        scattered = any(row.operation == "reduce_scatter" and row.phase == "backward" for row in rows)
        return scattered or any(record.detail.get("sharded") for own in self.each(Parameters) for record in own)

    def averaged(self, optimizer: int) -> bool:
        """Return True if the parameters of all ranks were equal after some update, e.g. because they were averaged."""
        after = [own for (number, moment, _), own in self.parameters.items() if (number, moment) == (optimizer, "step")]
        return any(_equal(own) for own in after)

    @cached_property
    def calls(self) -> list[list[Call]]:
        """The calls by rank, from the last record of each: one row for each operation, line and phase."""
        return [_merged(found[-1].rows) if found else [] for found in self.each(Calls)]

    def called(self) -> list[Call]:
        """Return the calls that the script itself makes, of all ranks: none in backward, none of DDP or FSDP."""
        rows = [row for own in self.calls for row in own if row.site and row.count]
        of_shards = ("all_gather", "reduce_scatter") if self.sharded else ()
        return [row for row in rows if not (row.by or row.phase == "backward" or row.operation in of_shards)]

    @cached_property
    def counted(self) -> int:
        """The number of steps in which the calls were counted."""
        return max((found[-1].last - found[-1].first + 1 for found in self.each(Calls) if found), default=0)

    @cached_property
    def all_steps(self) -> dict[int, list[Step]]:
        """Number of a step -> its records of all ranks."""
        return _common([{step.step: step for step in own} for own in self.each(Step)])

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """Number of a step after warm-up -> its records of all ranks."""
        return {number: own for number, own in self.all_steps.items() if number >= self.spec.warmup}

    def worked(self, number: int) -> list[float] | None:
        """Return each rank's seconds of work between the ends of the last step and this one; None if not recorded.

        Waiting for communication, samples of the observer, and time without a processor are left out. A busy machine
        causes the last one on any rank. An evaluation between two steps is included, though it belongs to no step. If
        only one rank evaluates, the time between the steps counts alone.
        """
        before, own = self.all_steps.get(number - 1), self.all_steps[number]
        pairs = list(zip(before or [], own, strict=bool(before)))
        pairs = [(a, b) for a, b in pairs if a.attempt == b.attempt]
        if sum(bool(step.evaluated) for step in own) == 1:  # the other ranks wait for it, with a processor or without
            spent: list[float | None] = [max(0.0, b.at - a.at - a.total) for a, b in pairs]
        else:
            spent = [_worked(a, b) for a, b in pairs]
        known = [seconds for seconds in spent if seconds is not None]
        return known if len(known) == len(own) else None

    def middle(self, of: Callable[[Step], float]) -> float:
        """Return the median over steps of the mean over ranks, without steps in which samples took over 10 %."""
        quiet = [own for own in self.steps.values() if all(step.observing <= 0.1 * step.total for step in own)]
        values = [statistics.fmean(of(step) for step in own) for own in quiet or list(self.steps.values())]
        return statistics.median(values) if values else 0.0

    @cached_property
    def step_time(self) -> float:
        return self.middle(lambda step: step.total - step.observing)

    @cached_property
    def exposed(self) -> float:
        return self.middle(lambda step: step.blocked)

    @cached_property
    def gradient_bytes(self) -> int:
        return max((start.gradient_bytes for own in self.each(Start) for start in own), default=0)

    def carriers(self) -> set[str]:
        """Return the lines of the script whose collectives carry gradients or parameters."""
        samples = [record for own in self.gradients.values() for record in own]
        between = [row for record in samples for row in record.detail.get("between", [])]
        hashes = [record for own in self.each(Parameters) for record in own]
        uses = [row for record in hashes for row in record.detail.get("uses", [])]
        return {str(row[1]) for row in (*between, *uses) if row[3] in ("gradients", "parameters", "all")}


def _worked(before: Step, step: Step) -> float | None:
    """Return the seconds of a rank's work between the ends of two steps; None if its processor time is unknown."""
    passed = step.at + step.total - (before.at + before.total) - step.blocked - step.observing
    if step.delayed is not None and before.delayed is not None:
        return max(0.0, passed - (step.delayed - before.delayed))
    if step.used is not None and before.used is not None:
        return max(0.0, min(passed, step.used - before.used))
    return None


def _common(by_rank: list[dict[Any, R]]) -> dict[Any, list[R]]:
    """Return the entries whose keys all ranks have, sorted by key: key -> values by rank."""
    shared = set(by_rank[0]).intersection(*by_rank[1:]) if by_rank else set()
    return {key: [own[key] for own in by_rank] for key in sorted(shared)}


def _replicas(hashes: list[Parameters]) -> bool:
    """Return True if the hashed tensors have equal number and size on all ranks, so that they can be replicas."""
    return len({(record.detail.get("tensors"), record.detail.get("bytes")) for record in hashes}) == 1


def _equal(hashes: list[Parameters]) -> bool:
    return len({record.hash for record in hashes}) == 1


def _merged(rows: Sequence[Call]) -> list[Call]:
    """Return one row for each operation, line and phase. The rows of several roots are added."""
    found: dict[tuple[str, str, str], Call] = {}
    for row in rows:
        key = (row.operation, row.site, row.phase)
        had = found.get(key)
        found[key] = row if had is None else _sum(had, row)
    return list(found.values())


def _sum(a: Call, b: Call) -> Call:
    added = {name: getattr(a, name) + getattr(b, name) for name in ("count", "bytes", "seconds", "blocked")}
    return Call(**(vars(a) | added))


def _ranks(numbers: Sequence[int]) -> str:
    """Return ranks as text: [0, 1, 2] -> 'ranks 0, 1 and 2'."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _site(run: Observed, optimizer: int) -> str:
    """Return the line that calls the optimizer's step; empty if it is not known."""
    found = (own[0] for (number, _), own in run.gradients.items() if number == optimizer)
    return str(next((record.detail.get("site", "") for record in found), ""))


def _updates(fits: Sequence[Fit]) -> str:
    return f"updates {', '.join(str(fit.step) for fit in fits)}"


def not_compared(run: Observed) -> Finding | None:
    """The nodes are not the ranks of one process group, so the rules cannot compare all of them."""
    if not run.group.alone:
        return None
    few = len(run.ranks) < 2
    of = f"of node {min(run.group.nodes.values())} alone"
    return Finding(
        "not_compared",
        "note",
        f"The nodes are not the ranks of one process group: findings are {of}, and "
        + ("ranks are not compared." if few else f"compare its {len(run.ranks)} ranks."),
        run.group.alone,
        "Start one process a node with {rank} of {world}, or give torchrun --nnodes {world} --node-rank {rank}.",
        "certain: the rank and the size of every process group were recorded",
        "processes that train without an optimizer of torch.optim",
    )


# gradients


def never_joined(run: Observed) -> Finding | None:
    """The script never calls init_process_group, so that every rank trains alone."""
    alone = [setup for setup in run.setups if not setup.backend or setup.world < 2]
    if len(run.ranks) < 2 or len(alone) < len(run.ranks):
        return None
    return Finding(
        "never_joined",
        "error",
        f"Each of the {len(run.ranks)} ranks trains alone: the script never joins a process group of all of them.",
        f"{len(alone)} of {len(run.ranks)} ranks had no process group of more than one rank at their first step",
        "Call torch.distributed.init_process_group() before the model is made, with the rank and world size of the "
        "command line or the environment.",
        "certain: init_process_group was watched",
        "ranks that exchange gradients by other means than torch.distributed",
        _site(run, 0),
    )


def not_synchronised(run: Observed) -> Finding | None:
    """The optimizer gets each rank's own gradients, and parameters are not averaged."""
    if never_joined(run):
        return None
    for number, kind, fits in run.decided():
        if kind not in ("local", "partial") or len(fits) < MIN_SAMPLES or run.averaged(number):
            continue
        site, what, fix = _site(run, number), "Gradients are not synchronised: each rank trains a model of its own.", ""
        late = _late(run)
        if kind == "partial":
            rests = zip(run.ranks, fits[-1].ranks, strict=True)
            have = [rank for rank, rest in rests if rest <= EXACT]
            what = f"Only {_ranks(have)} gets the mean of the gradients; the others update with their own."
            fix = "Send the mean back to all ranks (scatter or broadcast), or use all_reduce."
        elif late:
            site, what = late, "Gradients are synchronised after the optimizer has used them: replicas differ."
            fix = "Move the synchronisation between backward() and optimizer.step()."
        elif run.uses(DDP) is not None:
            fix = (
                "Call the DDP model itself, not model.module, in forward; no_sync() only around passes that accumulate."
            )
        else:
            fix = (
                "The model is never wrapped in DistributedDataParallel, and no collective carries its gradients: wrap "
                "it, or average .grad over all ranks between backward() and optimizer.step()."
            )
        own, far = max(min(fit.own) for fit in fits), min(max(fit.ranks) for fit in fits)
        evidence = (
            f"at {_updates(fits)} the optimizer got the rank's own gradients (residual {own:.1e}); to the mean over "
            f"ranks the residual is {far:.2g}"
        )
        sure = "certain for these updates: values before and after synchronisation were compared"
        refute = "parameters that are averaged more rarely than this run is long (local SGD); run more steps"
        return Finding("not_synchronised", "error", what, evidence, fix, sure, refute, site)
    return None


def _late(run: Observed) -> str:
    """Return the line of a collective that carries gradients after the optimizer's step; empty if there is none."""
    hashes = [record for own in run.each(Parameters) for record in own]
    for record in reversed(hashes):
        for _operation, site, phase, carries, _count in record.detail.get("uses", []):
            if phase not in ("sync", "backward", "update") and carries in ("gradients", "all"):
                return str(site)
    return ""


def _constant_factor(run: Observed, wanted: str) -> tuple[int, list[Fit]] | None:
    """Return the optimizer whose samples all have the kind `wanted`, and the samples; None if there is none.

    An optimizer whose loss was scaled to make up for the factor does not count.
    """
    for number, kind, fits in run.decided():
        if kind != wanted or len(fits) < MIN_SAMPLES:
            continue
        samples = [run.gradients[number, fit.step][0] for fit in fits]
        scales = [float(sample.detail.get("loss_scale", 1.0)) for sample in samples]
        ready = [
            near(fit.factor * scale, 1.0, 0.01) or near(fit.factor * scale * sample.passes, 1.0, 0.01)
            for fit, scale, sample in zip(fits, scales, samples, strict=True)
        ]
        if not any(ready):
            return number, fits
    return None


def summed(run: Observed) -> Finding | None:
    """Gradients are the sum over ranks."""
    found = _constant_factor(run, "sum")
    if found is None:
        return None
    number, fits = found
    world = len(run.ranks)
    return Finding(
        "summed",
        "error",
        f"Gradients are summed over {world} ranks, not averaged: in effect the learning rate is {world} times as high.",
        f"at {_updates(fits)} the optimizer got {fits[-1].factor:.6f} times the mean of all ranks' gradients "
        f"(residual {max(fit.residual for fit in fits):.1e})",
        "Divide by the world size after the reduction, or use ReduceOp.AVG where the backend has it.",
        "certain that it is the sum; that it is not wanted is likely",
        "a loss or a learning rate that is divided by the number of ranks on purpose",
        _reducer(run) or _site(run, number),
    )


def divided_twice(run: Observed) -> Finding | None:
    """Gradients are the mean, divided by the number of ranks again."""
    found = _constant_factor(run, "divided")
    if found is None:
        return None
    number, fits = found
    world = len(run.ranks)
    return Finding(
        "divided_twice",
        "error",
        f"Gradients are divided by {world} twice: in effect the learning rate is 1/{world} of the configured one.",
        f"at {_updates(fits)} the optimizer got {fits[-1].factor:.6f} times the mean of all ranks' gradients "
        f"(1/{world} = {1 / world:.6f}, residual {max(fit.residual for fit in fits):.1e})",
        "Leave out one division: DDP divides already, and so does ReduceOp.AVG.",
        "certain that the factor is constant; that it is not wanted is likely",
        f"gradients that are scaled by {1 / world:g} on purpose",
        _reducer(run) or _site(run, number),
    )


def wrong_factor(run: Observed) -> Finding | None:
    """Gradients are the mean times a constant, e.g. divided by a number of ranks that is written in the script."""
    found = _constant_factor(run, "scaled")
    if found is None:
        return None
    number, fits = found
    factor, world = fits[-1].factor, len(run.ranks)
    samples = [sample for fit in fits for sample in run.gradients[number, fit.step]]
    if len(fits) < MIN_CONSTANT or factor <= 0.0 or not all(near(fit.factor, factor) for fit in fits):
        return None
    if any(sample.detail.get("loss_is_sum") for sample in samples):  # gradients are divided instead of the loss
        return None
    divisor = world / factor
    instead = f": the sum over {world} ranks is divided by {divisor:.0f}" if near(divisor, round(divisor)) else ""
    return Finding(
        "wrong_factor",
        "error",
        f"Gradients are {factor:.4g} times the mean over ranks: in effect the learning rate is {factor:.4g} times the "
        "configured one.",
        f"at {_updates(fits)} the optimizer got {factor:.6f} times the mean of all ranks' gradients (residual "
        f"{max(fit.residual for fit in fits):.1e}){instead}",
        "Divide the sum by dist.get_world_size(), not by a number that is written in the script.",
        "certain that the factor is constant; that it is not wanted is likely",
        f"gradients that are scaled by {factor:.4g} on purpose, e.g. to undo a scale of the loss that was not seen",
        _reducer(run) or _site(run, number),
    )


def _reducer(run: Observed) -> str:
    """Return the line whose collectives carry gradients between backward and step; empty if there is none."""
    for own in run.gradients.values():
        for record in own:
            for _operation, site, _phase, carries, *_ in record.detail.get("between", []):
                if carries in ("gradients", "all"):
                    return str(site)
    return ""


def not_the_mean(run: Observed) -> Finding | None:
    """Gradients are synchronised but are no multiple of the mean."""
    for number, kind, fits in run.decided():
        if kind == "other" and len(fits) >= MIN_SAMPLES:
            return Finding(
                "not_the_mean",
                "note",
                "What the optimizer gets is no multiple of the mean of all ranks' gradients.",
                f"at {_updates(fits)} the residual is {min(fit.residual for fit in fits):.2g} or more",
                "Check which ranks' gradients enter the reduction, if this is not wanted.",
                "certain that it is not the mean; it may be wanted",
                "a lossy codec, a weighted mean, or groups of ranks that train apart",
                _site(run, number),
            )
    return None


def zero_gradients(run: Observed) -> Finding | None:
    """All gradients are zero in all samples of one rank or more."""
    for number in sorted({number for number, _ in run.gradients}):
        samples = [own for (each, _), own in run.gradients.items() if each == number]
        if len(samples) < MIN_SAMPLES:
            continue
        silent = [k for k in range(len(run.ranks)) if all(_is_zero(own[k]) for own in samples)]
        if silent:
            return Finding(
                "zero_gradients",
                "error",
                f"All gradients are zero on {_ranks([run.ranks[k] for k in silent])}: the model does not learn.",
                f"norm 0 of {len(samples[0][0].names)} tensors at each of {len(samples)} samples",
                "Check that the loss depends on the parameters of this optimizer, and that nothing resets gradients "
                "between backward() and optimizer.step().",
                "certain for these updates",
                "a loss that is at its minimum exactly",
                _site(run, number),
            )
    return None


def _is_zero(sample: Gradients) -> bool:
    norms = sample.detail.get("norms", [])
    return bool(sample.given) and bool(norms) and not any(norms) and not any(v for row in sample.given for v in row)


def reduced_twice(run: Observed) -> Finding | None:
    """Gradients are reduced in backward and again before the optimizer's step, or twice after backward."""
    if run.replaced:
        return None
    for (number, _), own in run.gradients.items():
        for record in own:
            size = float(record.detail.get("bytes", 0))
            rows = [row for row in record.detail.get("between", []) if row[3] in ("gradients", "all")]
            rows = [row for row in rows if row[0] in ("all_reduce", "reduce")]
            after = sum(row[5] for row in rows)
            inside = record.detail.get("pass_bytes", [0])[-1]
            if not size or after < CARRIED * size or inside + after < (1 + CARRIED) * size:
                continue
            if inside < CARRIED * size and after < 1.9 * size:
                continue
            first = "DDP reduces them in backward" if inside >= CARRIED * size else "the same line reduces them twice"
            site = str(rows[0][1])
            return Finding(
                "reduced_twice",
                "cost",
                f"Gradients are reduced twice in each step: {first}, then the script reduces them again.",
                f"{approximate_size(int(inside))} in backward and {approximate_size(int(after))} after it, for "
                f"{approximate_size(int(size))} of gradients",
                "Leave out the second reduction: gradients are the mean already.",
                "certain: the tensors of the second reduction are the gradients",
                "two reductions over different groups of ranks",
                site or _site(run, number),
                _cost(run, {site}),
            )
    return None


def _cost(run: Observed, sites: set[str]) -> float:
    """Return the seconds per step that a rank waits at these lines, outside backward; median over ranks."""
    if not run.counted:
        return 0.0
    waits = [sum(row.blocked for row in own if row.site in sites and row.phase != "backward") for own in run.calls]
    return statistics.median(waits) / run.counted if waits else 0.0


def no_no_sync(run: Observed) -> Finding | None:
    """DDP reduces gradients in every backward pass of an accumulation."""
    samples = [own[0] for own in run.gradients.values()]
    found = [record for record in samples if record.passes > 1 and _reduces_each(record)]
    if run.uses(DDP) is None or len(found) < MIN_SAMPLES or run.replaced:
        return None
    record = found[-1]
    saved = _blocked_in_passes(run, [str(site) for site in record.detail.get("pass_sites", [])])
    saved = run.exposed * (record.passes - 1) / record.passes if saved is None else saved
    return Finding(
        "no_no_sync",
        "cost",
        f"DDP sends the gradients in each of {record.passes} backward passes of a step; the last one is enough.",
        f"{', '.join(approximate_size(int(size)) for size in record.detail['pass_bytes'])} in the passes of a step, "
        f"for {approximate_size(int(record.detail['bytes']))} of gradients",
        "Put all passes but the last into `with model.no_sync():`.",
        "certain; the seconds are what the script waits for DDP in all passes but the last",
        "a backward pass whose gradients are read before the step",
        str(record.detail.get("site", "")),
        saved,
    )


def _blocked_in_passes(run: Observed, sites: Sequence[str]) -> float | None:
    """Return the seconds per step for which DDP blocks in all passes but the last; None if a line is not known."""
    if not all(sites) or len(sites) < 2 or not run.counted:
        return None
    waits = []
    for own in run.calls:
        blocked = {site: sum(row.blocked for row in own if row.site == site and row.by == DDP) for site in set(sites)}
        waits.append(sum(blocked[site] / sites.count(site) for site in sites[:-1]))
    return statistics.median(waits) / run.counted


def _reduces_each(record: Gradients) -> bool:
    size, passes = float(record.detail.get("bytes", 0)), record.detail.get("pass_bytes", [])
    return size > 0 and len(passes) > 1 and all(each >= CARRIED * size for each in passes)


# replicas and data


def different_start(run: Observed) -> Finding | None:
    """Ranks start with different parameters, which no later update makes equal."""
    if never_joined(run):
        return None
    for (number, moment, _), own in run.parameters.items():
        if moment == "start" and len(run.ranks) > 1 and not _equal(own) and not run.averaged(number):
            return Finding(
                "different_start",
                "error",
                "Ranks start with different parameters: they never train the same model.",
                f"{len({record.hash for record in own})} different hashes of all parameters on {len(own)} ranks before "
                "the first backward pass; they were not equal after a later sampled update either",
                "Set the same seed on all ranks before the model is made, or broadcast the parameters; DDP does.",
                "certain: all bytes of all parameters were compared",
                "parameters that belong to one rank by design, e.g. tensor or expert parallelism",
                _site(run, number),
            )
    return None


def replicas_drift(run: Observed) -> Finding | None:
    """Parameters differ between ranks though gradients are synchronised."""
    if never_joined(run) or different_start(run) or not_synchronised(run):
        return None
    kinds = {number: kind for number, kind, _ in run.decided()}
    for number in sorted({number for number, _, _ in run.parameters}):
        after = {
            step: own for (each, moment, step), own in run.parameters.items() if (each, moment) == (number, "step")
        }
        apart = [step for step, own in after.items() if not _equal(own)]
        if len(run.ranks) < 2 or not apart or max(after) not in apart or kinds.get(number) in ("local", "partial"):
            continue
        if len(apart) < MIN_SAMPLES:
            continue
        return Finding(
            "replicas_drift",
            "error",
            f"Replicas drift apart: parameters of the ranks differ from update {apart[0]} on.",
            f"hashes of all parameters differ after updates {', '.join(map(str, apart))}, of {len(after)} compared",
            "Look for values that differ by rank between backward() and the end of step(): the optimizer's state, "
            "learning rates, clipping by local norms, parameters outside the wrapped model.",
            "certain: all bytes of all parameters were compared",
            "parameters that belong to one rank by design",
            _site(run, number),
        )
    return None


def same_data(run: Observed) -> Finding | None:
    """Two or more ranks train on equal batches: hashes and local gradients are equal bit by bit."""
    batches = _common([{record.step: record for record in own} for own in run.each(Batch)])
    samples = list(run.gradients.values())
    if len(samples) < MIN_SAMPLES or (batches and len(batches) < MIN_SAMPLES) or not run.steps:
        return None
    groups: dict[tuple[Any, ...], list[int]] = {}
    for k, rank in enumerate(run.ranks):
        gradients = tuple(tuple(map(tuple, own[k].local)) for own in samples)
        if not any(value for sample in gradients for row in sample for value in row):
            continue
        data: tuple[Any, ...] = tuple(own[k].hash for own in batches.values())
        data = data or tuple(own[k].loss for own in run.steps.values())
        groups.setdefault((data, gradients), []).append(rank)
    equal = max(groups.values(), key=len, default=[])
    if len(equal) < 2:
        return None
    site = next((str(own[0].detail.get("site", "")) for own in batches.values()), "") or _site(run, 0)
    seen = (
        f"batches {', '.join(map(str, batches))} have equal hashes of all bytes" if batches else "all losses are equal"
    )
    return Finding(
        "same_data",
        "error",
        f"{_ranks(equal).capitalize()} train on the same data: these ranks repeat the same work.",
        f"{seen}, and local gradients are equal bit by bit at {len(samples)} of {len(samples)} samples",
        "Give each rank its own part: DistributedSampler, or a slice of each batch by rank.",
        "certain for these batches" if batches else "likely: the script has no DataLoader, so losses stand for batches",
        "ranks that train on the same data by design, e.g. tensor parallelism",
        site,
    )


def no_set_epoch(run: Observed) -> Finding | None:
    """Two complete training passes over a shuffling sampler have the same order."""
    for own in run.each(Pass):
        training = [
            each for each in own if each.shuffled and each.detail.get("training") and each.detail.get("updates")
        ]
        orders: dict[tuple[int, str, int], list[Pass]] = {}
        for each in training:
            orders.setdefault((each.epoch, each.order, each.length), []).append(each)
        same = max(orders.values(), key=len, default=[])
        if len(same) >= 2:
            return Finding(
                "no_set_epoch",
                "error",
                "Every epoch has the same order: the sampler's set_epoch() is not called.",
                f"{len(same)} whole passes over {same[0].length} indices in the same order with epoch {same[0].epoch}, "
                "though the sampler shuffles",
                "Call sampler.set_epoch(epoch) before each epoch.",
                "certain: all indices of whole passes with updates were compared",
                "an order that is repeated on purpose",
                same[0].site,
            )
    return None


# cost


def tiny_collectives(run: Observed) -> Finding | None:
    """A line calls many small collectives in each step."""
    if run.counted < MIN_STEPS or not run.step_time or run.replaced:
        return None
    for row in run.called():
        if not row.bytes:
            continue
        count, size = row.count / run.counted, row.bytes / row.count
        cost = _cost(run, {row.site})
        if count >= MANY and size <= TINY_BYTES and cost >= TINY_MATTERS * run.step_time:
            return Finding(
                "tiny_collectives",
                "cost",
                f"{row.operation} is called {count:.0f} times a step with {approximate_size(round(size))} on average.",
                f"{count:.0f} calls and {approximate_size(round(row.bytes / run.counted))} a step; the ranks wait "
                f"{seconds(cost)} for them, {100 * cost / run.step_time:.0f} % of a step",
                "Put the tensors into one buffer and call once: torch.cat, or DDP's buckets.",
                "certain that the calls are small; how much one buffer saves depends on the delay of the network",
                "tensors that must be sent at different times",
                row.site,
                cost,
            )
    return None


def metric_every_step(run: Observed) -> Finding | None:
    """A small value is communicated in every step."""
    if run.counted < MIN_STEPS or not run.step_time or len(run.ranks) < 2:
        return None
    carriers = run.carriers()
    for row in run.called():
        often = EVERY_STEP <= row.count / run.counted <= MANY
        if row.site in carriers or not often:
            continue
        if row.bytes / row.count <= SMALL_BYTES and row.operation not in ("send", "recv"):
            cost = _cost(run, {row.site})
            barrier = row.operation == "barrier"
            return Finding(
                "metric_every_step",
                "cost" if cost >= MATTERS * run.step_time else "note",
                f"{row.operation} {'' if barrier else 'of a small value '}in every step.",
                f"{row.count / run.counted:.1f} calls a step of {approximate_size(round(row.bytes / row.count))}; the "
                f"ranks wait {seconds(cost)} a step there, {100 * cost / run.step_time:.1f} %",
                _instead_of(row.operation),
                "certain that it is called; a part of the wait may move to the next collective",
                "a value that decides what the next step does",
                row.site,
                cost,
            )
    return None


def _instead_of(operation: str) -> str:
    """Return the advice on a small value that is communicated in every step."""
    if operation == "barrier":
        return "Leave out the barrier: collectives wait for each other already."
    if operation == "broadcast":
        return "Decide on each rank by values that all ranks know, or communicate the value every 50 steps."
    return "Add up the value on each rank, and communicate the sum every 50 steps or at the end of an epoch."


def needless_unused_search(run: Observed) -> Finding | None:
    """DDP searches for unused parameters although there are none."""
    options = run.uses(DDP)
    samples = [record for own in run.gradients.values() for record in own]
    if not options or not options.get("find_unused_parameters") or len(run.gradients) < MIN_SAMPLES:
        return None
    if any(record.detail.get("unused", 1) for record in samples):
        return None
    return Finding(
        "needless_unused_search",
        "note",
        "DDP searches the graph for unused parameters in every step, and there are none.",
        f"all {len(samples[0].names)} tensors got gradients in every pass of {len(run.gradients)} samples, all ranks",
        "Leave out find_unused_parameters=True.",
        "certain for these steps",
        "a model that uses other parameters in later steps",
        str(samples[0].detail.get("wrapped", "")),
    )


def rank_works_alone(run: Observed) -> Finding | None:
    """One rank repeatedly does work for which the others wait."""
    if len(run.steps) < MIN_STEPS or len(run.ranks) < 2:
        return None
    late, usual = _late_steps(run)
    who = statistics.mode(rank for _, rank, _ in late) if late else 0
    found = [each for each in late if each[1] == who]
    rank = run.ranks[who]
    if len(found) < ALONE_TIMES or len(found) < SAME_RANK * len(late):
        return None
    if statistics.median(each[2] for each in found) < ALONE_STANDS_OUT * usual:
        return None
    if f"node{run.group.nodes[rank]}" in run.spec.overrides or run.spec.faults or _slow_node(run, who):
        return None
    times = [each[2] for each in found]
    evaluation = statistics.mode(run.steps[number][who].evaluated for number, *_ in found)  # empty: other work
    waits = _waits_at(run, who, [each[0] for each in found])
    where = f"; the others wait for it at {waits}" if waits else ""
    does = "evaluates alone, and all others wait" if evaluation else "does work that all others wait for"
    return Finding(
        "rank_works_alone",
        "cost",
        f"Rank {rank} {does}.",
        f"in {len(found)} of {len(run.steps)} steps, e.g. {', '.join(str(each[0]) for each in found[:5])}: "
        f"{seconds(statistics.median(times))} each, with a step of {seconds(run.step_time)}{where}",
        "Divide this work among all ranks, or do it more rarely or after training: e.g. a test, a checkpoint, a "
        f"log on rank {rank} only.",
        f"certain that no other rank evaluated before these steps; likely that they waited for rank {rank}"
        if evaluation
        else "likely: time in which the rank had no processor is not counted; which line does the work was not "
        "recorded, only where the others wait",
        f"a node {run.group.nodes[rank]} whose disk or memory is slower",
        evaluation or waits,
        sum(times) / len(run.steps),
    )


def _late_steps(run: Observed) -> tuple[list[tuple[int, int, float]], float]:
    """Return the steps in which one rank worked longer than all others and these waited: number, rank, seconds.

    Also return the usual difference: in nine of ten other steps one rank worked longer by at most this.
    """
    late: list[tuple[int, int, float]] = []
    others: list[float] = []
    for number, own in run.steps.items():
        worked = run.worked(number)
        if worked is None:
            continue
        last = max(range(len(worked)), key=lambda k: worked[k])
        excess = worked[last] - max(value for k, value in enumerate(worked) if k != last)
        waited = max(step.blocked for k, step in enumerate(own) if k != last)
        if excess > max(ALONE_S, ALONE_SHARE * run.step_time) and waited >= 0.5 * excess:
            late.append((number, last, max(excess, waited - run.exposed)))
        else:
            others.append(excess)
    return late, sorted(others)[int(0.9 * len(others))] if others else 0.0


def _waits_at(run: Observed, who: int, numbers: Sequence[int]) -> str:
    """Return the line at which the other ranks wait longest in these steps; empty if it is not known."""
    waits: dict[str, float] = {}
    for number in numbers:
        for k, step in enumerate(run.steps[number]):
            for name, _, length, _ in step.comm if k != who else ():
                site = Collective.parse(name.removesuffix(CONTINUED)).site
                waits[site] = waits.get(site, 0.0) + length
    return max(waits, key=lambda site: waits[site], default="")


def _slow_node(run: Observed, who: int) -> bool:
    """Return True if a rank is slower in backward as well, so that its node is slow, not the script."""
    spent = [[_computing_backward(step) for step in own] for own in run.steps.values()]
    own = statistics.median(row[who] for row in spent)
    others = statistics.median(value for row in spent for k, value in enumerate(row) if k != who)
    return own > SLOW_NODE * others


def _computing_backward(step: Step) -> float:
    phases = [(begin, begin + length) for name, begin, length in step.phases if name == "backward"]
    stalls = [(max(a, begin), min(b, begin + length)) for a, b in phases for begin, length in step.stalls]
    return covered_length(phases) - covered_length([(a, b) for a, b in stalls if a < b])


def unequal_threads(run: Observed) -> Finding | None:
    """The script sets its own number of threads."""
    counts = {setup.threads for setup in run.setups if setup.threads}
    wanted = run.spec.threads
    if not counts or counts == {wanted}:
        return None
    unequal = len(counts) > 1
    many = ", ".join(map(str, sorted(counts)))
    return Finding(
        "unequal_threads",
        "cost" if unequal else "note",
        f"The script sets its own number of threads: {many} instead of {wanted}.",
        f"torch.get_num_threads() at the first step: {many} on {len(run.setups)} ranks; requested {wanted}",
        "Leave out torch.set_num_threads, or request the same number with --set threads=N: nodes on one machine share "
        "its cores.",
        "certain",
        "nodes with machines of their own",
    )


def no_overlap(run: Observed) -> Finding | None:
    """Gradients are sent after backward. DDP would send them during backward."""
    kinds = {kind for _, kind, _ in run.decided()}
    hand_written = run.uses(DDP) is None and not run.sharded and kinds & {"mean", "sum", "divided", "scaled", "nearly"}
    if (
        run.replaced
        or not hand_written
        or len(run.steps) < MIN_STEPS
        or run.gradient_bytes <= FIRST_BUCKET_BYTES
        or len(run.ranks) < 2
    ):
        return None
    exposed = run.exposed
    busy, hidden = run.middle(lambda step: step.busy), run.middle(lambda step: step.hidden)
    backward = run.middle(_computing_backward)
    saved = min(exposed, backward * (1 - FIRST_BUCKET_BYTES / run.gradient_bytes))
    if hidden > MAX_HIDDEN * busy or saved < TINY_MATTERS * run.step_time:
        return None
    rate = f" at {format_rate(run.spec.link.rate)}" if run.spec.link.rate else ""
    return Finding(
        "no_overlap",
        "cost",
        "Nothing is sent while backward runs: communication begins after backward.",
        f"exposed {seconds(exposed)}{rate}, hidden {seconds(hidden)}, backward {seconds(backward)} of a step of "
        f"{seconds(run.step_time)}",
        "Wrap the model in DistributedDataParallel, which sends each bucket as soon as its gradients are known.",
        f"the saving is at most {seconds(saved)}: all that fits beside backward",
        "processors that are busy with backward and with the network at once",
        _reducer(run) or _site(run, 0),
        saved,
    )


RULES: tuple[Callable[[Observed], Finding | None], ...] = (
    not_compared,
    never_joined,
    not_synchronised,
    summed,
    divided_twice,
    wrong_factor,
    different_start,
    replicas_drift,
    same_data,
    no_set_epoch,
    zero_gradients,
    reduced_twice,
    no_no_sync,
    no_overlap,
    tiny_collectives,
    metric_every_step,
    rank_works_alone,
    unequal_threads,
    needless_unused_search,
    not_the_mean,
)


def find(
    by_node: Mapping[int, Sequence[Record]],
    spec: RunSpec,
    forked: Mapping[int, Sequence[Sequence[Record]]] | None = None,
) -> list[Finding]:
    """Return all findings: errors, then costs, the largest first, then notes.

    `by_node`: the records of the first process of every node. `forked`: those of further processes that trained.
    """
    run = Observed(group_of(by_node, forked or {}) if by_node else Group({}, {}), spec)
    found = []
    for rule in RULES:
        try:
            made = rule(run)
        except DAMAGE as error:  # `detail` of a record is free-form, and a script can forge records
            made = Finding(
                rule.__name__,
                "note",
                f"The rule {rule.__name__} could not be applied: the records are not of the expected form.",
                f"{type(error).__name__}: {error}"[:200],
                "Run it again.",
                "certain",
                "-",
            )
        found += [made] if made else []
    return sorted(found, key=lambda each: (SEVERITIES.index(each.severity), -(each.seconds or 0.0)))


def find_in(folder: RunFolder) -> list[Finding]:
    """Return all findings about the script of a run folder. Raise TestbedError if the folder is damaged."""
    spec = folder.read_spec()
    paths = {rank: folder.records(rank) for rank in range(spec.world)}
    for path in paths.values():
        check_size([path] if path.exists() else [], MAX_RECORDS_BYTES)
    return find({rank: list(read(path)) for rank, path in paths.items()}, spec, read_forked(folder, spec))


def read_forked(folder: RunFolder, spec: RunSpec) -> dict[int, list[list[Record]]]:
    """Return by node the records of the processes beside the first one. Raise TestbedError if a file is damaged."""
    paths = {rank: folder.processes(rank) for rank in range(spec.world)}
    for own in paths.values():
        check_size(own, MAX_RECORDS_BYTES)
    return {rank: [list(read(path)) for path in own] for rank, own in paths.items() if own}
