"""The pipeline on 8 and 16 namespaces: it trains as the ring does, and no rank needs more than one of four."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from testbed.results.conclude import Summary, summarise
from testbed.results.folder import RunFolder
from testbed.spec.mode import SyncMode
from tests.support.command import rank_pids, start_command
from tests.support.rank_pool import RankRun

pytestmark = [pytest.mark.net, pytest.mark.gloo, pytest.mark.quiet]

STEPS = 4
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "16", "--steps", str(STEPS), "--set", "probe=false"]
SLOW = ["--rate", "5mbit"]  # a step takes half a second at least, so that the ranks are seen while they train
MORE_THREADS = 0  # of a rank than at N = 4
MORE_BYTES = 8 << 20  # resident; a rank has about 300 MB. Measured: 1 MB more at N = 8, 2 MB less at N = 16


class Trained(NamedTuple):
    """A run of the pipeline, and the most that any of its ranks had while it trained."""

    folder: RunFolder
    threads: int
    memory: int  # bytes


Train = Callable[[int], Trained]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`pipeline(8)` trains on 8 namespaces; equal calls train once."""

    @functools.cache
    def train(nodes: int) -> Trained:
        cwd = tmp_path_factory.mktemp(f"nodes{nodes}")
        flags = ["--on", "netns", "--nodes", str(nodes), "--mode", "ring/pipeline", *SLOW, *SMALL, "--out", "r"]
        folder, seen = RunFolder(cwd / "r"), dict[int, tuple[int, int]]()
        process = start_command("run", *flags, cwd=cwd)
        try:
            while process.poll() is None:
                for pid in rank_pids(cwd / "r") if steps_done(folder) else ():
                    seen[pid] = tuple(map(max, seen.get(pid, (0, 0)), threads_and_memory(pid)))  # type: ignore[assignment]
        finally:
            process.kill()
            _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said
        assert len(seen) == nodes, "not all ranks were seen while they trained"
        threads, memory = zip(*seen.values(), strict=True)
        return Trained(folder, max(threads), max(memory))

    return train


def steps_done(folder: RunFolder) -> int:
    path = folder.records(0)
    return path.read_text().count('"kind":"step"') if path.exists() else 0


def threads_and_memory(pid: int) -> tuple[int, int]:
    """Those of a process; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["Threads"]), int(fields.get("VmRSS", "0 kB").split()[0]) * 1024


def ring(like: RunFolder, path: Path) -> Summary:
    """The same training with the ring, on plain processes."""
    spec = like.read_spec()
    spec = spec.model_copy(update={"mode": SyncMode.parse("ring")})
    folder = RunFolder(path)
    folder.create(spec)
    with RankRun(path, spec.world) as run:
        assert set(run.wait(120)) == {0}, run.log_of(0)
    return summarise(folder, spec, status="ok")


@pytest.mark.parametrize("nodes", [8, 16])
def test_many_ranks_train_as_the_ring_does(pipeline: Train, nodes: int, tmp_path: Path) -> None:
    ours = Summary.read(pipeline(nodes).folder)
    plain = ring(pipeline(nodes).folder, tmp_path / "ring")
    assert ours.status == "ok" and ours.replicas_agree is True and ours.spec.world == nodes
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize("nodes", [8, 16])
def test_a_rank_of_many_needs_no_more_threads_and_memory_than_one_of_four(pipeline: Train, nodes: int) -> None:
    few, many = pipeline(4), pipeline(nodes)
    assert 0 < many.threads <= few.threads + MORE_THREADS, f"{many.threads} threads, of four ranks {few.threads}"
    assert 0 < many.memory <= few.memory + MORE_BYTES, f"{many.memory / 2**20:.1f} MiB, {few.memory / 2**20:.1f}"
