"""Events become records that the reader accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.attach import steps
from testbed.attach.events import Collective
from testbed.attach.steps import Phases, Steps
from testbed.rank.counters import NoCounter
from testbed.results.observations import Calls, Setup
from testbed.results.records import Record, Start, Step, read
from testbed.results.timeline import Timeline
from testbed.spec.run import SCHEMA


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> Phases:
    made = Phases(Timeline(clock=clock))
    made.start()
    return made


def play(phases: Phases, clock: Clock, *events: str) -> dict[str, float]:
    """Call the events one second apart; return seconds of phases and of the step."""
    for event in events:
        clock.now += 1
        if event == "wait":  # the second that has just passed
            phases.was_blocked(clock.now - 1, clock.now)
        else:
            getattr(phases, event)()
    return phases.timeline.take()


def seconds(step: dict[str, float]) -> dict[str, float]:
    return {name: step[name] for name in ("data", "forward", "backward", "sync", "update", "blocked") if step[name]}


def test_the_usual_loop(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "backward_began", "backward_ended", "wait", "update_began")
    step = play(phases, clock, "update_ended")
    # one second before the batch is the rest
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 3, "update": 1, "blocked": 1}
    assert step["total"] == 7


def test_without_a_loader_all_before_backward_is_forward(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "wait", "backward_began", "backward_ended", "update_began", "update_ended")
    assert seconds(step) == {"forward": 2, "backward": 1, "sync": 2, "update": 1, "blocked": 1}


def test_passes_of_a_closure_are_no_part_of_the_update(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "update_began", "backward_began", "backward_ended")
    step = play(phases, clock, "update_ended")
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 1, "update": 1}


def test_micro_batches_add_up(phases: Phases, clock: Clock) -> None:
    batch = ("data_began", "data_ended", "backward_began", "backward_ended")
    step = play(phases, clock, *batch, *batch, "update_began", "update_ended")
    assert seconds(step) == {"data": 2, "forward": 2, "backward": 2, "sync": 2, "update": 1}


def test_two_optimizers_make_one_step_without_overlapping_phases(phases: Phases, clock: Clock) -> None:
    turn = ("backward_began", "backward_ended", "update_began", "update_ended")
    step = play(phases, clock, "data_began", "data_ended", *turn, *turn)
    assert seconds(step) == {"data": 1, "forward": 2, "backward": 2, "sync": 4, "update": 2}
    assert step["total"] == 1 + 1 + 2 * 4


def test_a_wait_after_the_update_is_synchronisation(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "wait", "data_began", "data_ended", "backward_began", "backward_ended")
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 1, "blocked": 1}


def test_a_wait_inside_the_update_is_not_computing(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "backward_began", "backward_ended", "update_began", "wait", "update_ended")
    assert seconds(step)["update"] == 1 and seconds(step)["sync"] == 3 and seconds(step)["blocked"] == 1


def test_a_batch_that_no_backward_used_is_no_forward_pass(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "data_began", "data_ended", "backward_began")
    assert seconds(step) == {"data": 2, "forward": 1}


class Script:
    """Plays the events of a script and reads the records back."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.path = folder / "rank0.jsonl"
        self.sent: list[dict[str, Any]] = []
        self.steps = Steps(self.sent.append, NoCounter(), limit, 60.0, ["changed"], SCHEMA)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)

    def backward(self, loss: float = 2.0, reduced: list[Collective] | None = None) -> None:
        self.steps.backward_began(torch.tensor(loss))
        for each in reduced or []:
            self.steps.collective_began(each)
            each.launched = each.begun
            each.ended = self.steps.timeline.clock()
            self.steps.collective_ended(each)
        self.steps.backward_ended(reduced or [])

    def update(self, optimizer: Any) -> None:
        self.steps.update_began(optimizer)
        self.steps.update_ended(optimizer)

    def collective(self, operation: str = "all_reduce", size: int = 12, **detail: Any) -> Collective:
        return Collective(operation, size, self.steps.timeline.clock(), "main.py:9", "sync", {"group": 2, **detail})

    def records(self) -> list[Record]:
        self.path.write_text("".join(json.dumps(each) + "\n" for each in self.sent))
        return list(read(self.path))

    def recorded(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.records() if isinstance(each, kind)]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_all_records_are_read_as_their_classes(script: Script) -> None:
    script.backward()
    script.update(script.optimizer())
    script.steps.ends()
    assert [type(each) for each in script.records()] == [Start, Setup, Step, Calls]
    start, setup, step, _ = script.records()
    assert isinstance(start, Start) and (start.parameters, start.gradient_bytes, start.tensors) == (3, 12, 1)
    assert isinstance(setup, Setup) and setup.changed == ["changed"]
    assert isinstance(step, Step) and step.loss == 2.0 and step.cpu is not None


def rounds(script: Script, count: int, optimizers: list[torch.optim.Optimizer]) -> list[Step]:
    for _ in range(count):
        for loss, optimizer in enumerate(optimizers):
            script.steps.data_ended(object(), torch.zeros(5, 2))
            script.backward(float(loss), [script.collective()])
            script.update(optimizer)
    script.steps.ends()
    return script.recorded(Step)


def test_two_optimizers_that_take_turns_make_one_step_of_a_round(script: Script) -> None:
    optimizers = [script.optimizer(), script.optimizer()]
    for each in optimizers:
        script.steps.optimizer_made(each)
    steps = rounds(script, 3, optimizers)
    assert [(step.step, step.loss, step.images) for step in steps] == [(k, 0.5, 10) for k in range(3)]
    first, second, _ = steps
    assert [name for name, *_ in first.phases] == [name for name, *_ in second.phases]
    offsets = [offset for _, offset, *_ in first.comm]
    assert len(offsets) == len(second.comm) == 2 and 0 <= offsets[0] < offsets[1] < first.total
    assert first.at + first.total <= second.at
    assert first.blocked + first.hidden == pytest.approx(first.busy, abs=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_sizes_are_those_of_all_optimizers_of_a_step(script: Script, count: int) -> None:
    optimizers = [script.optimizer(), script.optimizer()]
    shared = torch.optim.Adam(optimizers[0].param_groups[0]["params"])
    for each in (*optimizers, shared):
        script.steps.optimizer_made(each)
    rounds(script, count, [*optimizers, shared])
    (start,), (setup,) = script.recorded(Start), script.recorded(Setup)
    assert (start.parameters, start.gradient_bytes, start.tensors) == (6, 24, 2)
    assert setup.optimizers == ["SGD", "Adam"]


@pytest.mark.parametrize("used", [1, 2])
def test_a_single_round_is_one_step(script: Script, used: int) -> None:
    optimizers = [script.optimizer(), script.optimizer()]
    for each in optimizers:
        script.steps.optimizer_made(each)
    assert [step.step for step in rounds(script, 1, optimizers[:used])] == [0]


def test_a_second_optimizer_that_is_never_used_changes_nothing(script: Script) -> None:
    optimizers = [script.optimizer(), script.optimizer()]
    for each in optimizers:
        script.steps.optimizer_made(each)
    assert [step.step for step in rounds(script, 3, optimizers[:1])] == [0, 1, 2]


@pytest.mark.parametrize(
    ("updates", "losses"),
    [
        ("AAABBB", [[0], [1], [2], [3], [4], [5]]),  # another optimizer for the last layers, or a new one in each epoch
        ("ABBB", [[0, 1], [2], [3]]),
        ("ABABCDCD", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("ABABAAA", [[0, 1], [2, 3], [4, 5], [6]]),
        ("AABAABA", [[0], [1], [2, 3], [4], [5, 6]]),  # B updates seldom
    ],
)
def test_steps_are_recorded_after_an_optimizer_was_replaced(
    script: Script, updates: str, losses: list[list[int]]
) -> None:
    optimizers = {name: script.optimizer() for name in sorted(set(updates))}
    for each in optimizers.values():
        script.steps.optimizer_made(each)
    for number, name in enumerate(updates):
        script.backward(float(number), [script.collective()])
        script.update(optimizers[name])
    script.steps.ends()
    steps = script.recorded(Step)
    assert [(step.step, step.loss) for step in steps] == [(k, sum(each) / len(each)) for k, each in enumerate(losses)]
    assert [len(step.comm) for step in steps] == [len(each) for each in losses]


def test_the_last_requested_step_is_not_held_after_an_optimizer_was_replaced(tmp_path: Path) -> None:
    script = Script(tmp_path, limit=3)
    first, second = script.optimizer(), script.optimizer()
    script.update(first)
    script.update(first)
    with pytest.raises(SystemExit):
        script.update(second)
    assert script.sent.pop() == {"kind": "limit", "steps": 3} and len(script.recorded(Step)) == 3


def test_processor_time_is_of_the_whole_process(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not count delays, the processor time stands for them."""
    first, *_ = rounds(script, 1, [script.optimizer()])
    assert (first.delayed is None) == (not Path(steps.SCHEDSTAT).exists()) and (first.delayed or 0.0) >= 0.0
    monkeypatch.setattr(steps, "SCHEDSTAT", "/nothing")
    *_, last = rounds(script, 1, [script.optimizer()])
    assert last.delayed is None and last.used is not None and last.used > 0.0


def test_a_wait_belongs_to_the_collective_that_was_waited_for(script: Script) -> None:
    script.backward()
    one, other = script.collective(size=4, reduce="sum"), script.collective("broadcast", 8, root=1)
    for each in (one, other):
        script.steps.collective_began(each)
    since = script.steps.timeline.clock()
    other.ended = since + 0.5
    script.steps.collective_ended(other)
    script.steps.waited(since, since + 0.5, [other])
    one.ended = since + 0.5
    script.steps.collective_ended(one)
    script.update(script.optimizer())
    script.steps.ends()
    (calls,) = script.recorded(Calls)
    blocked = {row.operation: row.blocked for row in calls.rows}
    assert blocked == {"all_reduce": 0.0, "broadcast": pytest.approx(0.5)}
    assert [row.detail for row in calls.rows] == [
        {"group": 2, "reduce": "sum", "smallest": 4, "largest": 4},
        {"group": 2, "root": 1, "smallest": 8, "largest": 8},
    ]


def test_calls_of_one_line_are_one_row(script: Script) -> None:
    for size in (4, 8):
        each = script.collective(size=size)
        script.steps.collective_began(each)
        each.ended = each.begun + 1
        script.steps.collective_ended(each)
    script.backward()
    script.update(script.optimizer())
    script.steps.ends()
    (row,) = script.recorded(Calls)[0].rows
    assert (row.count, row.bytes, row.detail["smallest"], row.detail["largest"]) == (2, 12, 4, 8)
    assert row.seconds == pytest.approx(2)


def test_ddp_blocks_from_its_last_launch_until_all_have_ended(script: Script) -> None:
    buckets = [script.collective(size=4), script.collective(size=8)]
    script.backward(reduced=buckets)
    script.update(script.optimizer())
    (step,) = script.recorded(Step)
    ended = max(each.ended or 0.0 for each in buckets)
    assert step.blocked == pytest.approx(ended - max(each.launched for each in buckets), abs=2e-6)
    assert step.blocked + step.hidden == pytest.approx(step.busy, rel=1e-9)


def test_the_loss_is_what_was_multiplied_by_a_scaler(script: Script) -> None:
    loss = torch.tensor(3.0)
    scaled = loss * 65536
    script.steps.scaled(scaled, loss)
    script.steps.backward_began(scaled)
    script.steps.backward_ended([])
    script.update(script.optimizer())
    assert script.recorded(Step)[0].loss == 3.0


def test_a_batch_that_was_only_looked_at_begins_no_epoch(script: Script) -> None:
    class Loader:
        _index_sampler = object()

    optimizer, peeked = script.optimizer(), Loader()
    batch = (torch.zeros(5, 2), torch.zeros(5))
    script.steps.data_began(peeked)
    script.steps.data_ended(peeked, batch)
    passes = [Loader(), Loader()]
    for each in passes:
        for _ in range(2):
            script.steps.data_began(each)
            script.steps.data_ended(each, batch)
            script.backward()
            script.update(optimizer)
        script.steps.data_began(each)
        script.steps.data_exhausted(each)
    steps = script.recorded(Step)
    assert [step.epoch for step in steps] == [0, 0, 1, 1]
    assert [step.images for step in steps] == [5, 5, 5, 5]


def test_an_evaluation_belongs_to_no_step(script: Script) -> None:
    optimizer, loader = script.optimizer(), object()
    script.backward()
    script.update(optimizer)
    ended = script.steps.timeline.begun
    script.steps.evaluation_began()
    with torch.no_grad():
        script.steps.data_began(loader)
        script.steps.data_ended(loader, torch.zeros(7, 1))
    script.steps.evaluation_ended()
    assert script.steps.timeline.begun > ended
    script.backward()
    script.update(optimizer)
    script.backward()
    script.update(optimizer)
    steps = script.recorded(Step)
    assert [step.images for step in steps[1:]] == [0, 0]
    assert [Path(__file__).name in step.evaluated for step in steps] == [False, True, False]


def test_the_script_ends_after_the_requested_steps(tmp_path: Path) -> None:
    script = Script(tmp_path, limit=2)
    optimizer = script.optimizer()
    script.backward()
    script.update(optimizer)
    script.backward()
    with pytest.raises(SystemExit) as ended:
        script.update(optimizer)
    assert ended.value.code == 0
    assert script.sent.pop() == {"kind": "limit", "steps": 2}
    assert len(script.recorded(Step)) == 2
