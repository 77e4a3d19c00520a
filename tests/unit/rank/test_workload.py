"""Emulated compute: recorded times are kept, parameters and gradients are real, and replicas differ without a mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from testbed.rank import workload
from testbed.rank.workload import EmulatedOptimizer, Model, Replay, Samples
from testbed.results.profile import Profile, ProfiledLayer
from testbed.spec.errors import SpecError
from testbed.spec.run import RunSpec

PROFILE = Profile(
    model="three",
    batch_per_rank=8,
    layers=(
        ProfiledLayer(name="a", sizes=(4000, 40), shapes=((10, 100), (10,)), forward_s=0.01, backward_s=0.03),
        ProfiledLayer(name="b", forward_s=0.005, backward_s=0.005),
        ProfiledLayer(name="c", sizes=(80,), forward_s=0.01, backward_s=0.02),
    ),
    data_s=0.004,
    zero_s=0.002,
    loss_s=0.005,
    optimizer_s=0.008,
)


class Clock:
    """A clock on which every sleep takes `late` seconds too long."""

    def __init__(self, late: float) -> None:
        self.now, self.late, self.slept = 100.0, late, []

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(0.001)
    monkeypatch.setattr(workload, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


def test_what_a_sleep_takes_too_long_is_deducted_from_the_next(clock: Clock) -> None:
    replay = Replay()
    begun = clock.now
    for _ in range(10):
        replay.until(0.01, clock.now)
    assert clock.slept == [0.01] + [0.009] * 9
    assert clock.now - begun == pytest.approx(0.101)


def test_work_is_part_of_the_recorded_time_and_times_are_made_slower(clock: Clock) -> None:
    replay = Replay(slower=3.0)
    since = clock.now
    clock.now += 0.02  # work
    replay.until(0.01, since)
    assert clock.slept == [0.01]


def test_a_long_stop_is_not_made_up_for(clock: Clock) -> None:
    replay = Replay()
    since = clock.now
    clock.now += 30.0
    replay.until(0.01, since)
    replay.until(0.2, clock.now)
    assert clock.slept == [0.1]  # a tenth of a second of the 30 is deducted, no more


def test_passes_take_the_recorded_time_and_gradients_come_in_order(clock: Clock) -> None:
    model = Model(PROFILE, torch.float32, Replay(), rank=0)
    assert [tuple(p.shape) for p in model.parameters()] == [(10, 100), (10,), (20,)]
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, clock.now)))
    since = clock.now
    logits = model(torch.zeros(8, 2))
    forward = clock.now - since
    since = clock.now
    torch.nn.functional.cross_entropy(logits, torch.zeros(8, dtype=torch.int64)).backward()
    backward = clock.now - since
    assert logits.shape == (8, 2)
    assert forward + backward == pytest.approx(0.085 + clock.late)  # of all sleeps only the last is too long
    assert 0.025 <= forward <= 0.025 + 0.005 + clock.late  # the loss may be a part of it
    assert [name for name, _ in order] == ["layers.2.tensor0", "layers.0.tensor0", "layers.0.tensor1"]
    assert forward + order[0][1] - since >= 0.05 and order[1][1] - order[0][1] > 0.025  # loss + c, then b + a


def test_gradients_differ_from_rank_to_rank() -> None:
    found = []
    for rank in range(2):
        torch.manual_seed(0)
        model = Model(PROFILE, torch.float32, Replay(1e-3), rank)
        model(torch.zeros(8, 2)).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(2 * a, b) and a.abs().max() > 0 for a, b in zip(*found, strict=True))


def test_gradients_of_several_passes_add_up() -> None:
    model = Model(PROFILE, torch.float32, Replay(1e-3), rank=0)
    for _ in range(2):
        model(torch.zeros(8, 2)).sum().backward()
    assert all(torch.allclose(p.grad, 2e-3 * p) for p in model.parameters())


def test_the_optimizer_updates_and_takes_the_recorded_time(clock: Clock) -> None:
    model = Model(PROFILE, torch.float32, Replay(1e-3), rank=0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.zeros(8, 2)).sum().backward()
    optimizer = EmulatedOptimizer(PROFILE, model, Replay(), lr=0.5, clip=None)
    optimizer.step()
    assert clock.slept[-1] == 0.008
    after = list(model.parameters())
    assert all(torch.allclose(b * (1 - 0.5e-3), a) for b, a in zip(before, after, strict=True))


def test_shards_take_their_share_of_the_optimizers_time(clock: Clock) -> None:
    model = Model(PROFILE, torch.float32, Replay(), rank=0)
    optimizer = EmulatedOptimizer(PROFILE, model, Replay(), lr=0.5, clip=None)
    half = torch.ones(515)
    optimizer.own_shards([half])
    optimizer.step_shard(0, torch.ones(515))
    assert clock.slept == [0.004]
    assert half[0] == 0.5


def test_a_batch_takes_the_recorded_time(clock: Clock) -> None:
    samples = Samples(100, 0.004, Replay())
    images, labels = samples.batch(torch.arange(8).numpy(), None, torch.float32)
    assert clock.slept == [0.004]
    assert images.shape == (8, 2) and labels.tolist() == [0] * 8 and len(samples) == 100


def test_a_tests_accuracy_and_a_dilation_of_real_compute_are_refused() -> None:
    with pytest.raises(SpecError, match="the model learns nothing, so a test has no meaning"):
        RunSpec.load({"compute": "emulated:p.json", "evaluate": "split"}, "case")
    with pytest.raises(SpecError, match="only emulated compute and shaped links can be made slower"):
        RunSpec.load({"dilation": 2.0}, "case")
    with pytest.raises(SpecError, match=r"compute = 'fast': unknown\. Use real, emulated, or emulated:FILE"):
        RunSpec.load({"compute": "fast"}, "case")
    spec = RunSpec.load({"compute": "emulated:p.json", "model": "my.py:make", "data": {"name": "my.py:load"}}, "case")
    assert spec.evaluate == "never" and list(spec.own_files) == ["compute"]
