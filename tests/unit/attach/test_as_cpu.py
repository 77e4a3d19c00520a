"""A script for CUDA takes the CPU. Each test runs in a process of its own, because torch itself is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testbed.attach.as_cpu import cpu

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cuda", "cpu"),
        ("cuda:3", "cpu"),
        ("cpu", "cpu"),
        ("cudax", "cudax"),
        ("torch.cuda.FloatTensor", "torch.FloatTensor"),
        (torch.device("cuda:1"), torch.device("cpu")),
        (torch.device("meta"), torch.device("meta")),
        ({"cuda:0": "cuda:1"}, {"cpu": "cpu"}),
        (torch.float32, torch.float32),
        (None, None),
    ],
)
def test_cuda_becomes_the_cpu(given: object, expected: object) -> None:
    assert cpu(given) == expected


CODE = """
import torch
from torch import nn
from testbed.attach import as_cpu
changed = []
as_cpu.install(changed)
exec(compile(SOURCE, "/script/main.py", "exec"))
print("ok", changed)
"""


def run(source: str, **variables: str) -> str:
    code, environment = CODE.replace("SOURCE", repr(source)), os.environ | variables
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_finds_a_gpu_and_libraries_do_not() -> None:
    run("""
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert not torch.get_autocast_dtype("cpu") is None
with torch.random.fork_rng():  # torch itself asks
    pass
assert torch.cuda.get_device_properties(0).total_memory == 0 and torch.cuda.get_device_name(0) == "CPU"
""")


def test_a_script_finds_the_accelerators_that_are_visible() -> None:
    run(
        """
assert torch.accelerator.is_available() and torch.accelerator.device_count() == torch.cuda.device_count() == 2
device = torch.accelerator.current_accelerator()
assert device.type == "cuda" and torch.zeros(1, device=device).device.type == "cpu"
torch.accelerator.set_device_index(1)
torch.accelerator.synchronize()
with torch.accelerator.device_index(1):
    assert torch.accelerator.current_device_index() == 0
assert torch.distributed.get_default_backend_for_device(device) == "nccl"
""",
        CUDA_VISIBLE_DEVICES="0,1",
    )


def test_numbers_of_devices_and_contexts_are_the_cpu() -> None:
    run("""
with torch.device("cuda"):
    made = torch.empty(2)
with torch.device("meta"):
    assert torch.empty(2).device.type == "meta"
found = [made, torch.ones(1).to(0), torch.ones(1).to(1, torch.float64), torch.zeros(2, device=0),
         *nn.Linear(1, 1).to(0).parameters(), *nn.Linear(1, 1, device="cuda").parameters(),
         torch.cuda.FloatTensor([1.0]), torch.ones(1).type(torch.cuda.DoubleTensor),
         torch.ones(1).type("torch.cuda.LongTensor")]
assert {each.device.type for each in found} == {"cpu"}
assert found[2].dtype == torch.float64 and found[-1].dtype == torch.int64
assert torch.ones(3).to(torch.float64).dtype == torch.float64 and torch.zeros(3).shape == (3,)
""")


def test_a_synchronised_batchnorm_is_that_of_the_rank() -> None:
    output = run("""
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
images = torch.arange(12.0).view(4, 3)
assert torch.equal(model(images), nn.BatchNorm1d(3)(images)) and type(model[0]) is nn.SyncBatchNorm
""")
    assert "SyncBatchNorm has no code for the CPU" in output


def test_tensors_and_modules_stay_on_the_cpu() -> None:
    output = run("""
device = torch.device("cuda:0")
found = [torch.zeros(2, device="cuda"), torch.ones(1).cuda(), torch.ones(1).to(device, non_blocking=True),
         torch.ones(1).to("cuda", torch.float64), torch.ones(1).new_zeros(3, device=device), torch.ones(1).pin_memory(),
         torch.tensor([1.0], device=device), *nn.Linear(1, 1).cuda(0).parameters(),
         *nn.Linear(1, 1).to(device).parameters()]
assert {each.device.type for each in found} == {"cpu"} and found[3].dtype == torch.float64
assert torch.arange(3).to("cuda").tolist() == [0, 1, 2]
""")
    assert output.startswith("ok ['--as-cpu: CUDA devices")


def test_autocast_and_scaler_are_those_of_the_cpu() -> None:
    run("""
for context in (torch.autocast("cuda"), torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16),
                torch.cuda.amp.autocast(dtype=torch.bfloat16), torch.autocast(device_type="cuda", enabled=True)):
    with context:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
for scaler in (torch.amp.GradScaler(), torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler(),
               torch.amp.GradScaler(device="cuda")):
    loss = scaler.scale(torch.ones(1, requires_grad=True).sum())
    assert loss.item() == 65536.0
""")


def test_torch_load_and_events(tmp_path: Path) -> None:
    run(f"""
torch.save(torch.ones(1), {str(tmp_path / "x")!r})
assert torch.load({str(tmp_path / "x")!r}, map_location="cuda:0").tolist() == [1.0]
assert torch.load({str(tmp_path / "x")!r}, map_location={{"cuda:0": "cuda:1"}}).tolist() == [1.0]
a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
a.record(); b.record(); torch.cuda.synchronize()
assert a.elapsed_time(b) >= 0
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
""")
