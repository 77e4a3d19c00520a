"""Each rule about a user's script: a planted fault is found, a legitimate look-alike is silent. By records alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from testbed.report.script_findings import RULES, as_line, find
from testbed.results.observations import Batch, Call, Calls, Finding, Gradients, Parameters, Pass, Setup, Swap
from testbed.results.records import Record, Start, Step
from testbed.spec.run import RunSpec
from testbed.spec.script import ScriptSpec

WORLD = 4
SIZE = 8 << 20  # bytes of the gradients
SAMPLED = (0, 1, 3, 7)
STEPS = 12
Values = list[float]
Given = Callable[[int, list[Values]], Values]


def spec_of(**more: Any) -> RunSpec:
    script = ScriptSpec(argv=("python", "main.py"), folder="/tmp")
    return RunSpec(nodes=WORLD, mode="script", script=script, batch=WORLD, **more)


def mean_of(local: list[Values]) -> Values:
    return [sum(values) / len(local) for values in zip(*local, strict=True)]


def times(factor: float, values: Values) -> Values:
    return [factor * value for value in values]


def the_mean(rank: int, local: list[Values]) -> Values:
    return mean_of(local)


def its_own(rank: int, local: list[Values]) -> Values:
    return local[rank]


class Script:
    """Records of a correct DDP script, with what a test changes."""

    def __init__(self, given: Given = the_mean, ddp: bool = True, **options: Any) -> None:
        self.given, self.local = given, self.own_locals
        self.wrappers = {"DistributedDataParallel": options} if ddp else {}
        self.backend, self.world, self.threads = "gloo", WORLD, [1] * WORLD
        self.detail: dict[str, Any] = {"pass_bytes": [SIZE if ddp else 0]}
        self.passes = 1
        self.norms = 1.0
        self.hash: Callable[[int, str, int], str] = lambda rank, moment, step: f"{moment} {step}"
        self.hash_detail: dict[str, Any] = {}
        self.batch: Callable[[int, int], str] = lambda rank, step: f"{rank} {step}"
        self.passed: list[Pass] = []
        self.rows: list[Call] = []
        self.own: Callable[[int, int], float] = lambda rank, step: 0.1  # seconds of a rank's own work
        self.evaluation: Callable[[int, int], float] = lambda rank, step: 0.0  # seconds of it before the step
        self.has_delays = True  # the kernel counts them
        self.delayed: Callable[[int, int], float] = lambda rank, step: 0.0  # seconds of it without a processor
        self.comm, self.hidden, self.backward = 0.05, 0.04, 0.05

    @staticmethod
    def own_locals(step: int) -> list[Values]:
        draw = random.Random(step)
        return [[draw.gauss(0, 1) for _ in range(30)] for _ in range(WORLD)]

    def records(self, rank: int) -> list[Record]:
        parameters = {"parameters": SIZE // 4, "gradient_bytes": SIZE, "tensors": 2, "deadline": 9.0, "counter": "lo"}
        found: list[Record] = [Start(rank=rank, world=self.world, unix=0.0, **parameters)]
        setup = {"backend": self.backend, "wrappers": self.wrappers, "threads": self.threads[rank]}
        found.append(Setup(rank=rank, world=self.world, **setup))
        found.append(self._parameters(rank, "start", 0))
        for step in range(STEPS):
            found.append(self._step(rank, step))
            if step in SAMPLED:
                found.append(Batch(step=step, hash=self.batch(rank, step), images=8, detail={"site": "main.py:20"}))
                found += [self._gradients(rank, step), self._parameters(rank, "step", step)]
        return [*found, *self.passed, Calls(first=0, last=STEPS - 1, rows=self.rows)]

    def _parameters(self, rank: int, moment: Any, step: int) -> Parameters:
        detail = {"optimizer": 0, "tensors": 2, "bytes": SIZE} | self.hash_detail
        return Parameters(step=step, moment=moment, hash=self.hash(rank, moment, step), detail=detail)

    def _gradients(self, rank: int, step: int) -> Gradients:
        local = self.local(step)
        detail = {"optimizer": 0, "site": "main.py:30", "bytes": SIZE, "unused": 0, "norms": [self.norms]}
        detail |= {"between": [], "wrapped": "main.py:12", "loss_scale": 1.0} | self.detail
        values = {"local": [local[rank]], "given": [self.given(rank, local)]}
        return Gradients(step=step, passes=self.passes, names=["w"], **values, detail=detail)

    def _step(self, rank: int, step: int) -> Step:
        own = [self.own(each, step) + self.evaluation(each, step) for each in range(WORLD)]
        blocked = max(own) - own[rank] + self.comm - self.hidden
        total, evaluation = self.own(rank, step) + blocked, self.evaluation(rank, step)
        ended = sum(
            max(self.own(each, k) + self.evaluation(each, k) for each in range(WORLD)) + self.comm - self.hidden
            for k in range(step + 1)
        )
        delayed = sum(self.delayed(rank, k) for k in range(step + 1))
        phases = {"data": 0.0, "forward": 0.02, "backward": self.backward, "sync": 0.02, "update": 0.01}
        spans = [("backward", 0.02, self.backward)]
        sums = {"blocked": blocked, "busy": blocked + self.hidden, "hidden": self.hidden}
        counts = {"loss": 2.0 + rank, "images": 8, "sent": 0, "received": 0}
        sums |= {"total": total, "at": ended - total} | ({"delayed": delayed} if self.has_delays else {})
        line = "main.py:50" if evaluation else ""
        comm = [("all_reduce main.py:29", 0.02, blocked + self.hidden, SIZE)]
        return Step(step=step, epoch=0, **phases, **counts, **sums, phases=spans, comm=comm, evaluated=line)

    def found(self, **spec: Any) -> list[Finding]:
        return find({rank: self.records(rank) for rank in range(WORLD)}, spec_of(**spec))

    def rules(self, **spec: Any) -> dict[str, Finding]:
        return {finding.rule: finding for finding in self.found(**spec)}


def call(operation: str, site: str, each_step: float, size: int, blocked: float, phase: str = "sync") -> Call:
    count = round(each_step * STEPS)
    wait = blocked * STEPS
    return Call(operation=operation, site=site, phase=phase, count=count, bytes=count * size, blocked=wait)


def test_a_correct_script_has_no_finding() -> None:
    assert Script().found() == []


def test_a_finding_says_everything_a_reader_needs() -> None:
    script = Script(its_own, ddp=False)
    script.hash = lambda rank, moment, step: "start" if moment == "start" else f"{rank} {step}"
    (finding,) = script.found()
    assert finding.severity == "error" and finding.site == "main.py:30"
    assert all((finding.title, finding.evidence, finding.fix, finding.sure, finding.refuted_by))
    assert as_line(finding).startswith("error: ") and "main.py:30" in as_line(finding)


def test_gradients_that_are_not_synchronised_are_found_and_local_sgd_is_not() -> None:
    apart = Script(its_own, ddp=False)
    apart.hash = lambda rank, moment, step: "start" if moment == "start" else f"{rank} {step}"
    assert "never wrapped" in apart.rules()["not_synchronised"].fix
    assert "replicas_drift" not in apart.rules()  # one cause, one finding
    averaged = Script(its_own, ddp=False)
    averaged.hash = lambda rank, moment, step: f"{rank} {step}" if step == 1 else f"{moment} {step}"
    assert averaged.found() == []


def test_synchronisation_after_the_step_is_named_with_its_line() -> None:
    late = Script(its_own, ddp=False)
    late.hash = lambda rank, moment, step: "start" if moment == "start" else f"{rank} {step}"
    late.hash_detail = {"uses": [["all_reduce", "main.py:33", "other", "gradients", 9]]}
    finding = late.rules()["not_synchronised"]
    assert "after the optimizer" in finding.title and finding.site == "main.py:33"


def test_a_mean_that_only_one_rank_gets_is_found() -> None:
    partial = Script(lambda rank, local: mean_of(local) if rank == 0 else local[rank], ddp=False)
    partial.hash = lambda rank, moment, step: "start" if moment == "start" else f"{rank} {step}"
    assert partial.rules()["not_synchronised"].title.startswith("Only rank 0 gets the mean")


def test_a_sum_is_found_and_a_loss_that_was_divided_for_it_is_not() -> None:
    script = Script(lambda rank, local: times(WORLD, mean_of(local)), ddp=False)
    assert "4.000000" in script.rules()["summed"].evidence and script.rules()["summed"].severity == "error"
    script.detail["loss_scale"] = 1 / WORLD
    assert "summed" not in script.rules()


def test_two_divisions_are_found_and_a_factor_that_varies_is_not() -> None:
    script = Script(lambda rank, local: times(1 / WORLD, mean_of(local)))
    assert script.rules()["divided_twice"].severity == "error"
    clipped = Script(lambda rank, local: times(0.25 if local[0][0] > 0 else 0.2, mean_of(local)))
    assert "divided_twice" not in clipped.rules()


def test_a_constant_wrong_factor_is_found_with_its_divisor() -> None:
    found = Script(lambda rank, local: times(2.0, mean_of(local)), ddp=False).rules()["wrong_factor"]
    assert found.severity == "error" and "2 times the mean" in found.title
    assert "2.000000 times" in found.evidence and "the sum over 4 ranks is divided by 2" in found.evidence


@pytest.mark.parametrize(
    ("factor", "detail"),
    [
        (lambda local: 0.2 + 0.01 * local[0][0], {}),  # clipping by hand
        (lambda local: min(1.0, 0.8 + 0.3 * local[0][0]), {}),  # of some updates
        (lambda local: 1 / 1024, {"loss_scale": 1024.0}),
        (lambda local: 1 / 8, {"loss_is_sum": True}),  # gradients are divided by the number of images
        (lambda local: -1.0, {}),  # a gradient that is reversed on purpose
    ],
)
def test_a_factor_that_may_be_wanted_is_no_error(
    factor: Callable[[list[Values]], float], detail: dict[str, Any]
) -> None:
    script = Script(lambda rank, local: times(factor(local), mean_of(local)), ddp=False)
    script.detail |= detail
    assert "error" not in {finding.severity for finding in script.found()}


def test_weighted_means_of_uneven_batches_are_no_error() -> None:
    def weighted(rank: int, local: list[Values]) -> Values:
        """The mean over images: batches are even at most updates, and the last one of a pass is not."""
        weights = [1.0] * WORLD if local != Script.own_locals(SAMPLED[-1]) else [1.0, 1.0, 1.0, 0.25]
        return [
            sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            for values in zip(*local, strict=True)
        ]

    assert Script(weighted).found() == []


def test_a_sum_at_most_updates_is_found() -> None:
    def mostly(rank: int, local: list[Values]) -> Values:
        return times(1.0 if local == Script.own_locals(SAMPLED[-1]) else WORLD, mean_of(local))

    found = Script(mostly, ddp=False).rules()["summed"]
    assert f"at updates {', '.join(map(str, SAMPLED[:-1]))} the optimizer" in found.evidence


def test_gradients_that_are_no_mean_are_a_note_and_a_lossy_codec_is_none() -> None:
    assert Script(lambda rank, local: local[0]).rules()["not_the_mean"].severity == "note"
    coarse = Script(lambda rank, local: [round(20 * value) / 20 for value in mean_of(local)])
    assert coarse.found() == []


def test_zero_gradients_are_found_and_a_first_step_without_any_is_not() -> None:
    script = Script(lambda rank, local: times(0, local[0]))
    script.local, script.norms = lambda step: [[0.0] * 30] * WORLD, 0.0
    assert script.rules()["zero_gradients"].severity == "error"
    script.local = lambda step: Script.own_locals(step) if step else [[0.0] * 30] * WORLD
    script.given, script.norms = the_mean, 1.0
    assert script.found() == []


def test_replicas_that_drift_are_found_and_shards_are_not() -> None:
    script = Script()
    script.hash = lambda rank, moment, step: f"{moment} {step}" if step < 3 else f"{rank} {step}"
    assert "from update 3" in script.rules()["replicas_drift"].title
    script.hash_detail = {"sharded": True}
    assert script.found() == []


def test_different_starts_are_found_and_ranks_with_other_parts_of_a_model_are_not() -> None:
    script = Script(ddp=False)
    script.hash = lambda rank, moment, step: f"{rank} {step}"
    assert script.rules()["different_start"].severity == "error"
    parts = Script(ddp=False)
    parts.hash = script.hash
    records = {rank: parts.records(rank) for rank in range(WORLD)}
    for rank, own in records.items():
        for record in own:
            if isinstance(record, Parameters):
                record.detail["bytes"] = SIZE + rank
    assert find(records, spec_of()) == []


def test_equal_data_is_found_only_with_equal_gradients() -> None:
    same = Script()
    same.batch = lambda rank, step: str(step)
    same.local = lambda step: [Script.own_locals(step)[0]] * WORLD
    assert same.rules()["same_data"].severity == "error" and same.rules()["same_data"].site == "main.py:20"
    peeked = Script()
    peeked.batch = same.batch
    assert peeked.found() == []
    hooked = Script()  # a hook synchronised the gradients before they were sampled
    hooked.local = same.local
    assert hooked.found() == []


def test_equal_data_of_some_ranks_names_them() -> None:
    script = Script()
    script.batch = lambda rank, step: f"{rank % 3} {step}"
    script.local = lambda step: [Script.own_locals(step)[rank % 3] for rank in range(WORLD)]
    assert script.rules()["same_data"].title.startswith("Ranks 0 and 3 train on the same data")


def passes(epochs: tuple[int, ...], **more: Any) -> list[Pass]:
    detail = {"training": True, "updates": 5} | more.pop("detail", {})
    rows = [{"number": k, "epoch": epoch, "order": str(epoch)} for k, epoch in enumerate(epochs)]
    return [Pass(**row, length=64, site="main.py:19", detail=detail, **({"shuffled": True} | more)) for row in rows]


def test_a_missing_set_epoch_is_found() -> None:
    script = Script()
    script.passed = passes((0, 0, 0))
    assert script.rules()["no_set_epoch"].site == "main.py:19"


@pytest.mark.parametrize(
    "passed",
    [passes((0, 1, 2)), passes((0, 0), shuffled=False), passes((0, 0), detail={"updates": 0}), passes((0,))],
    ids=["set_epoch", "no shuffle", "statistics of the data", "one pass"],
)
def test_passes_that_may_be_equal_are_silent(passed: list[Pass]) -> None:
    script = Script()
    script.passed = passed
    assert script.found() == []


def test_reduction_in_every_pass_is_found_and_no_sync_is_silent() -> None:
    script = Script()
    script.passes, script.detail["pass_bytes"] = 3, [SIZE, SIZE, SIZE]
    finding = script.rules()["no_no_sync"]
    assert finding.severity == "cost" and finding.seconds == pytest.approx(0.01 * 2 / 3)
    rows = [call("all_reduce", f"main.py:{line}", 1, SIZE, 0.006, "backward") for line in (27, 28, 40)]
    script.rows = [Call(**(vars(row) | {"by": "DistributedDataParallel"})) for row in rows]
    script.detail["pass_sites"] = ["main.py:27", "main.py:27", "main.py:28"]  # line 40: another model
    assert script.rules()["no_no_sync"].seconds == pytest.approx(0.006)
    script.detail["pass_bytes"] = [0, 0, SIZE]
    assert script.found() == []


def test_a_second_reduction_is_found_and_clipping_by_a_global_norm_is_not() -> None:
    script = Script()
    script.detail["between"] = [["all_reduce", "main.py:28", "sync", "gradients", 2, SIZE]]
    assert script.rules()["reduced_twice"].site == "main.py:28"
    script.detail["between"] = [["all_reduce", "main.py:28", "sync", "other", 1, 4]]
    assert script.found() == []


def test_a_gather_and_a_scatter_are_one_reduction() -> None:
    script = Script(ddp=False)
    script.comm = script.hidden = 0.0
    rows = [
        ["gather", "main.py:26", "sync", "gradients", 2, SIZE],
        ["scatter", "main.py:28", "sync", "gradients", 2, SIZE],
    ]
    script.detail["between"] = rows
    assert script.found() == []


def test_many_tiny_collectives_are_found_and_large_ones_are_not() -> None:
    script = Script()
    script.rows = [call("all_reduce", "main.py:27", 60, 2048, 0.03)]
    assert script.rules()["tiny_collectives"].seconds == pytest.approx(0.03)
    script.rows = [call("all_reduce", "main.py:27", 60, 1 << 20, 0.03)]
    assert script.found() == []


def test_a_metric_in_every_step_is_found_and_one_at_times_is_not() -> None:
    script = Script()
    script.rows = [call("all_reduce", "main.py:35", 1, 4, 0.004)]
    finding = script.rules()["metric_every_step"]
    assert finding.severity == "cost" and finding.site == "main.py:35" and finding.seconds == pytest.approx(0.004)
    script.rows = [call("all_reduce", "main.py:35", 1, 4, 0.0001)]
    assert script.rules()["metric_every_step"].severity == "note"
    script.rows = [call("all_reduce", "main.py:35", 0.25, 4, 0.004)]
    assert script.found() == []


def test_small_gradients_are_no_metric() -> None:
    script = Script()
    script.rows = [call("all_reduce", "main.py:27", 2, 40, 0.004)]
    script.detail["between"] = [["all_reduce", "main.py:27", "sync", "gradients", 2, 80]]
    assert script.found() == []


def test_a_needless_search_for_unused_parameters_is_found() -> None:
    script = Script(find_unused_parameters=True)
    assert script.rules()["needless_unused_search"].site == "main.py:12"
    script.detail["unused"] = 1
    assert script.found() == []


def test_work_of_one_rank_that_others_wait_for_is_found() -> None:
    script = Script()
    script.own = lambda rank, step: 0.3 if rank == 0 and step % 3 == 0 else 0.1
    finding = script.rules()["rank_works_alone"]
    assert finding.title.startswith("Rank 0") and finding.seconds == pytest.approx(0.2 * 3 / 10, rel=0.01)
    assert finding.site == "main.py:29" and "wait for it at main.py:29" in finding.evidence


def test_differences_between_ranks_as_they_occur_in_all_steps_are_no_work_alone() -> None:
    """Rank 0 is 60 ms late in every third step, and some rank is 24 ms late in all others: a busy machine."""
    script = Script()
    script.own = lambda rank, step: 0.1 + (0.06 if step % 3 == 0 else 0.024) * (rank == (0 if step % 3 == 0 else 1))
    assert script.found() == []
    script.own = lambda rank, step: 0.16 if rank == 0 and step % 3 == 0 else 0.1
    assert "rank_works_alone" in script.rules()


def test_a_few_milliseconds_are_no_work_alone() -> None:
    script = Script()
    script.comm = script.hidden = script.backward = 0.0
    script.own = lambda rank, step: 0.006 if rank == 0 and step % 3 == 0 else 0.002
    assert script.found() == []


def test_a_rank_that_has_no_processor_does_not_work_alone() -> None:
    """Another process of the machine takes the core of rank 0 in every third step."""
    script = Script()
    script.own = lambda rank, step: 0.3 if rank == 0 and step % 3 == 0 else 0.1
    script.delayed = lambda rank, step: script.own(rank, step) - 0.1
    assert script.found() == []
    script.has_delays = False
    assert script.found() == [], "without a count of the kernel nothing is said"
    script.has_delays, script.delayed = True, lambda rank, step: 0.01
    assert "rank_works_alone" in script.rules()


def test_an_evaluation_of_one_rank_is_found_with_its_line_and_one_of_all_ranks_is_not() -> None:
    script = Script()
    script.evaluation = lambda rank, step: 0.2 if rank == 0 and step % 3 == 0 else 0.0
    finding = script.rules()["rank_works_alone"]
    assert finding.title.startswith("Rank 0 evaluates") and finding.site == "main.py:50"
    assert finding.seconds == pytest.approx(0.2 * 3 / 10, rel=0.01)
    script.delayed = lambda rank, step: 0.9 * script.evaluation(rank, step)  # of a busy machine: the others wait for it
    assert script.rules()["rank_works_alone"].site == "main.py:50"
    script.evaluation = lambda rank, step: 0.2 if step % 3 == 0 else 0.0
    assert script.found() == []


@pytest.mark.parametrize(
    ("own", "spec"),
    [
        (lambda rank, step: 0.3 if rank == step % 4 else 0.1, {}),
        (lambda rank, step: 0.3 if rank == 0 and step == 6 else 0.1, {}),
        (lambda rank, step: 0.11 if rank == 0 else 0.1, {}),
        (lambda rank, step: 0.3 if rank == 0 else 0.1, {"overrides": {"node0": {"cpus": 0.1}}}),
    ],
    ids=["each rank in turn", "once", "small", "a node with a smaller share"],
)
def test_unequal_times_for_another_reason_are_silent(own: Callable[[int, int], float], spec: dict[str, Any]) -> None:
    script = Script()
    script.own = own
    assert script.found(**spec) == []


def test_threads_of_the_scripts_own_are_found() -> None:
    script = Script()
    script.threads = [2] * WORLD
    assert script.rules()["unequal_threads"].severity == "note"
    assert script.found(threads=2) == []
    script.threads = [1, 1, 1, 8]
    assert script.rules()["unequal_threads"].severity == "cost"


def test_communication_that_waits_for_backward_is_found_and_a_small_gradient_is_not() -> None:
    script = Script(ddp=False)
    script.hidden = 0.0
    finding = script.rules(link={"rate": "200mbit"})["no_overlap"]
    assert finding.seconds == pytest.approx(0.05 * 7 / 8) and "200mbit" in finding.evidence
    records = {rank: script.records(rank) for rank in range(WORLD)}
    small = {rank: [_with_few_bytes(record) for record in own] for rank, own in records.items()}
    assert find(small, spec_of()) == []
    script.hidden = 0.04
    assert script.found() == []


def test_under_another_mode_nothing_is_said_about_the_scripts_own_synchronisation() -> None:
    script = Script(ddp=False)
    script.hidden = 0.0
    script.rows = [call("all_reduce", "main.py:27", 60, 2048, 0.03)]
    script.detail["between"] = [["all_reduce", "main.py:28", "sync", "gradients", 2, 2 * SIZE]]
    assert {"no_overlap", "tiny_collectives", "reduced_twice"} <= set(script.rules())
    records = {rank: [*script.records(rank), Swap(step=4, mode="ring")] for rank in range(WORLD)}
    assert find(records, spec_of()) == []


def _with_few_bytes(record: Record) -> Record:
    return Start(**(vars(record) | {"gradient_bytes": 4096})) if isinstance(record, Start) else record


def test_a_script_that_joins_no_group_is_found() -> None:
    script = Script(its_own, ddp=False)
    script.backend, script.world = "", 1
    script.hash = lambda rank, moment, step: f"{rank} {step}"  # one cause, one finding
    assert [finding.rule for finding in script.found()] == ["never_joined"]
    assert "never_joined" not in Script().rules()


def test_forged_details_become_a_note() -> None:
    script = Script()
    script.detail = {"pass_bytes": "x", "between": 7, "bytes": "many", "norms": {}, "loss_scale": []}
    found = script.found()
    assert {finding.severity for finding in found} == {"note"}
    assert all("could not be applied" in finding.title for finding in found)


def test_errors_come_first_then_the_dearest() -> None:
    script = Script(its_own)
    script.hash = lambda rank, moment, step: "start" if moment == "start" else f"{rank} {step}"
    script.rows = [call("all_reduce", "main.py:35", 1, 4, 0.004), call("all_reduce", "main.py:27", 60, 2048, 0.03)]
    script.threads = [2] * WORLD
    assert [finding.severity for finding in script.found()] == ["error", "cost", "cost", "note"]
    assert script.found()[1].rule == "tiny_collectives"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_rule_speaks_without_records(rule: Any) -> None:
    assert find({}, spec_of()) == [] and find({0: []}, spec_of()) == [] and find({0: [], 1: []}, spec_of()) == []
    assert rule.__doc__


def forked(script: Script, world: int, ranks: dict[int, int]) -> list[list[Record]]:
    """The records of these ranks (their own number: whose records they have) in a process group of this size."""
    return [
        [
            Setup(**(vars(r) | {"world": world, "rank": own})) if isinstance(r, Setup) else r
            for r in script.records(rank)
        ]
        for own, rank in ranks.items()
    ]


def test_forked_ranks_of_all_nodes_are_compared_as_one_group() -> None:
    """torchrun --nproc-per-node 2 on two nodes: the first process that trains on node 0 is rank 1 here."""
    script = Script(lambda rank, local: times(WORLD, mean_of(local)), ddp=False)
    one, zero, two, three = forked(script, WORLD, {1: 1, 0: 0, 2: 2, 3: 3})
    found = {each.rule: each for each in find({0: one, 1: two}, spec_of(), {0: [zero], 1: [three]})}
    assert "summed over 4 ranks" in found["summed"].title and "not_compared" not in found
    script.given = the_mean
    one, zero, two, three = forked(script, WORLD, {1: 1, 0: 0, 2: 2, 3: 3})
    assert find({0: one, 1: two}, spec_of(), {0: [zero], 1: [three]}) == []


def test_nodes_that_are_groups_of_their_own_are_not_compared_with_each_other() -> None:
    """Each node forks two ranks on the same data as the other node: legitimate, and seen as "same data" before."""
    script = Script(lambda rank, local: mean_of(local[:2]) if rank < 2 else mean_of(local[2:]))
    script.local = lambda step: Script.own_locals(step)[:2] * 2
    script.batch = lambda rank, step: f"{rank % 2} {step}"
    pair, other = forked(script, 2, {0: 0, 1: 1}), forked(script, 2, {0: 2, 1: 3})
    (note,) = find({0: pair[0], 1: other[0]}, spec_of(), {0: pair[1:], 1: other[1:]})
    assert note.rule == "not_compared" and note.severity == "note" and "compare its 2 ranks" in note.title
    script.local = lambda step: Script.own_locals(step)[:1] * 4
    script.batch = lambda rank, step: str(step)
    pair = forked(script, 2, {0: 0, 1: 1})
    rules = [each.rule for each in find({0: pair[0], 1: other[0]}, spec_of(), {0: pair[1:], 1: other[1:]})]
    assert rules == ["same_data", "not_compared"], "ranks of one node are compared"


def test_ranks_of_a_group_that_was_not_seen_whole_are_not_compared() -> None:
    script = Script(its_own)
    script.batch, script.local = lambda rank, step: str(step), lambda step: [Script.own_locals(step)[0]] * WORLD
    script.hash = lambda rank, moment, step: f"{rank} {step}"
    first, second = forked(script, 8, {0: 0, 4: 1})
    (note,) = find({0: first, 1: second}, spec_of())
    assert note.rule == "not_compared" and "rank 0 of 8 on node 0, rank 4 of 8 on node 1" in note.evidence
    assert "ranks are not compared" in note.title
