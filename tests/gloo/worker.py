"""One rank of a pool (tests/support/rank_pool.py): join the group once, then do the cases that come in on stdin."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.counters import SocketCounter
from testbed.rank.group import Group, join, single_rank_group
from testbed.rank.optim import Optimizer
from testbed.rank.recorder import Recorder
from testbed.rank.replicas import parameter_hash
from testbed.rank.sync.buckets import choose_bucket
from testbed.rank.sync.check import check_mode
from testbed.rank.sync.schedules import build
from testbed.rank.train import Trainer, gradient_bytes
from testbed.results.timeline import Timeline
from testbed.spec.errors import UsageError
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec, RunSpec

DEADLINE = 100.0  # seconds of any one wait
Case = dict[str, Any]


class Known(nn.Module):
    """A model whose gradient is its input: the loss is the sum of parameter x wanted gradient.

    Parameters start at zero, so one SGD step with a learning rate of 1 leaves minus the mean gradient, exactly.
    `transposed` ones give backward a gradient that is not contiguous; `unused` ones take no part in the loss. In the
    middle of backward it sleeps for `slow` seconds.
    """

    slow = 0.0

    def __init__(self, shapes: list[list[int]], dtype: torch.dtype, transposed: list[int], unused: list[int]) -> None:
        super().__init__()
        self.transposed, self.unused = transposed, unused
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)

    def forward(self, wanted: list[Tensor]) -> Tensor:
        loss = torch.zeros((), dtype=wanted[0].dtype)
        for number, (value, gradient) in enumerate(zip(self.values, wanted, strict=True)):
            if number in self.unused:
                continue
            if number in self.transposed:
                loss = loss + (value.t() * gradient.t().contiguous()).sum()
            else:
                loss = loss + (value * gradient).sum()
            if self.slow and number == len(wanted) // 2:
                loss.register_hook(lambda _: time.sleep(self.slow))
        return loss


def wanted_gradients(case: Case, rank: int, step: int) -> list[np.ndarray]:
    """The gradients of one rank and step; the test draws the same ones."""
    random = np.random.default_rng((rank, step))
    return [random.standard_normal(shape).astype(case["dtype"]) for shape in case["shapes"]]


def mean(case: Case, group: Group) -> Case:
    """Step `steps` times through a mode with known gradients; the parameters afterwards go to the .npz file.

    Before step `handover`, the state is moved to a new model and a new mode, as from a checkpoint. Parameters
    of `resting` are used in every other step only.
    """
    timeline = Timeline()
    model = Known(case["shapes"], getattr(torch, case["dtype"]), case["transposed"], case["unused"])
    model.slow = case.get("slow", 0.0)
    sync, module = _attach(model, case, group, timeline)
    for step in range(case["steps"]):
        if step == case.get("handover"):
            kept = {name: value.clone() for name, value in sync.state().items()}
            sync.close()
            model = copy.deepcopy(model)
            sync, module = _attach(model, case, group, timeline)
            if sync.needs_warmup_step:
                module([torch.from_numpy(g) for g in wanted_gradients(case, group.rank, 0)]).backward()
            sync.load(kept)
        model.unused = [*case["unused"], *(case.get("resting", []) if step % 2 else [])]
        timeline.start()
        sync.zero()
        module([torch.from_numpy(g) for g in wanted_gradients(case, group.rank, step)]).backward()
        sync.step()
    sizes = [size for *_, size in timeline.take()["comm"]]
    kept = {name: value.tolist() for name, value in sync.state().items()} if case.get("kept") else {}
    sync.close()
    _save(case, group.rank, model)
    found = {"sizes": sizes, "payload": dict(group.payload), "kept": kept}
    return {"hash": parameter_hash(model), "frozen": model.frozen.tolist(), **found}


def _attach(model: Known, case: Case, group: Group, timeline: Timeline) -> tuple[Any, nn.Module]:
    for value in model.values:
        value.grad = None
        value._post_accumulate_grad_hooks = None  # hooks that the mode of the original model has set
    rule = OptimizerSpec(lr=1.0, momentum=0.0, weight_decay=0.0, clip=case.get("clip"))
    optimizer = Optimizer(rule, model, batch=1, total=case["steps"])
    mode = choose_bucket(SyncMode.parse(case["mode"]), gradient_bytes(model), group).mode
    sync = build(mode, "before-step", group, timeline, seed=case.get("seed", 0))
    return sync, sync.attach(model, optimizer)


def threads(case: Case, group: Group) -> Case:
    """What an attached mode adds to this process: scheduling classes of new threads, descriptors left after its end."""
    model = Known(case["shapes"], getattr(torch, case["dtype"]), case["transposed"], case["unused"])
    before, files = _listed("task"), len(_listed("fd"))
    sync, _ = _attach(model, case, group, Timeline())
    classes = [os.sched_getscheduler(thread) for thread in _listed("task") - before]
    sync.close()
    end = time.monotonic() + 5.0
    while _listed("task") - before and time.monotonic() < end:
        time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
    return {"classes": classes, "left": len(_listed("task") - before), "files": len(_listed("fd")) - files}


def _listed(folder: str) -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self", folder).iterdir()}


def train(case: Case, group: Group) -> Case:
    """A whole training run with the real loop. Records go to `run`, parameters and buffers to the .npz file.

    `extra_checks`: how often the mode is tried on known numbers in addition. `methods`: the folder of own methods.
    """
    os.environ["TESTBED_METHODS"] = case.get("methods", "methods")
    spec = RunSpec.load(case["spec"], "case")
    own = single_rank_group() if spec.world == 1 else group
    own.racks = spec.topology.racks
    if group.rank >= spec.world:
        return {}
    with Recorder(Path(case["run"]) / f"rank{group.rank}.jsonl") as recorder:
        trainer = Trainer(spec, own, recorder, SocketCounter())
        for _ in range(case.get("extra_checks", 0)):
            check_mode(spec, trainer.model, own)
        try:
            trainer.run()
        except UsageError as error:
            return {"refused": str(error)}
    _save(case, group.rank, trainer.model)
    return {"hash": parameter_hash(trainer.model)}


def check(case: Case, group: Group) -> Case:
    """Try the modes of these specs on known numbers in place of parameters of these shapes; why each was refused."""
    os.environ["TESTBED_METHODS"] = case.get("methods", "methods")
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in case["shapes"])
    before, refusals = torch.get_rng_state(), []
    for values in case["specs"]:
        spec, store = RunSpec.load(values, "case"), dist.PrefixStore(str(len(refusals)), group.store)
        own = Group(group.rank, group.size, store, DEADLINE, racks=spec.topology.racks)
        mode = choose_bucket(spec.mode, gradient_bytes(model), own, spec.limiting_rates).mode  # as before each run
        try:
            check_mode(spec.model_copy(update={"mode": mode}), model, own)
            refusals.append("")
        except UsageError as error:
            refusals.append(str(error))
        assert set(own.payload) == {"metrics"}, "what the check sends is not counted as gradients"
    assert torch.equal(torch.get_rng_state(), before)
    return {"refusals": refusals}


def _save(case: Case, rank: int, model: nn.Module) -> None:
    state = {name: value.detach() for name, value in model.state_dict().items()}
    bf16 = torch.bfloat16  # numpy does not have it
    arrays = {name: (value.float() if value.dtype == bf16 else value).numpy() for name, value in state.items()}
    np.savez(Path(case["folder"]) / f"{case['name']}.rank{rank}.npz", **arrays)


KINDS: dict[str, Callable[[Case, Group], Case]] = {
    "mean": mean,
    "train": train,
    "threads": threads,
    "check": check,
}


def answer(text: str, group: Group) -> Case:
    """Run one case with its own prefix in the store, so that cases do not read each other's values."""
    case = json.loads(text)
    store = dist.PrefixStore(case["name"], group.store)
    racks = tuple(tuple(rack) for rack in case.get("racks", []))
    own = Group(group.rank, group.size, store, case.get("deadline", DEADLINE), racks=racks)
    found = KINDS[case["kind"]](case, own)
    return found | {"arrays": f"{case['folder']}/{case['name']}.rank{group.rank}.npz"}


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # the loop prints too, and stdout must have answers only
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = join(rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), DEADLINE)
    print(json.dumps({"ready": rank}), file=out, flush=True)
    for text in sys.stdin:
        try:
            found = answer(text, group)
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
