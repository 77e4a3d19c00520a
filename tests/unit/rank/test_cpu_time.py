"""The instrument that reads processor time: known work in, at least that much out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from testbed.rank import cpu_time
from testbed.rank.cpu_time import CpuMeter, CpuTime, machine_id, read_cpu_time

WORK_S = 0.2
BURN = f"import time\nwhile time.process_time() < {WORK_S}: pass"


def own_cpu() -> float:
    found = read_cpu_time()
    assert found is not None
    return found.own


def burn() -> None:
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass


def test_the_machines_time_is_that_of_its_cores_without_idle_time_and_interrupts(tmp_path: Path) -> None:
    """User, nice and system are sampled at ticks, so they are not used."""
    stat, found = tmp_path / "stat", list[CpuTime]()
    for unused in ("9000 70 400 300 30", "9010 80 420 330 60"):
        stat.write_text(f"cpu  500 20 80 {unused} 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\ncpu1 1 1 1 1 1 1 1 0 0 0\nintr 1\n")
        reading = read_cpu_time(stat)
        assert reading is not None
        found.append(reading)
    first, second = found
    elapsed = second.at - first.at
    assert second.machine - first.machine == pytest.approx(2 * elapsed - 100 / os.sysconf("SC_CLK_TCK"), abs=1e-6)


@pytest.mark.parametrize("text", [None, "", "cpu\n", "cpu 1 2 3 a b c d e\n", "cpu 1 2 3 4 5 6 7 8\n", "intr 1 2 3\n"])
def test_a_kernel_that_counts_nothing_is_no_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert read_cpu_time(tmp_path / "stat") is None
    assert machine_id(tmp_path / "none") == ""


def test_other_threads_of_the_rank_count_as_its_own() -> None:
    before = own_cpu()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert own_cpu() - before >= WORK_S


def test_children_of_the_rank_count_as_its_own() -> None:
    before = own_cpu()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert own_cpu() - before >= WORK_S


def test_the_machine_counts_other_processes_and_the_rank_does_not() -> None:
    """A process that still runs is no ended child: the rank's own time leaves it out."""
    before = read_cpu_time()
    with subprocess.Popen([sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        after = read_cpu_time()
        other.communicate(b"\n")
    assert before is not None and after is not None
    assert after.machine - before.machine >= WORK_S / 2 > after.own - before.own  # ticks of up to 10 ms


def test_a_meter_measures_from_the_first_begin_to_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([CpuTime(10.0, 100.0, 1.0), CpuTime(12.0, 103.0, 2.0), CpuTime(15.0, 107.0, 2.5)])
    monkeypatch.setattr(cpu_time, "read_cpu_time", lambda: next(readings))
    meter = CpuMeter()
    meter.end()  # no step was measured yet: an epoch of warm-up alone
    assert meter.fields() == {}
    for call in (meter.begin, meter.begin, meter.end, meter.end):
        call()
    assert meter.fields() == {"machine": machine_id(), "measured": 5.0, "machine_cpu": 7.0, "own_cpu": 1.5}
