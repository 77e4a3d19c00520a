"""What all tests share: which groups this machine can run, how workers share it, and pools of rank processes.

A test whose group cannot run here is skipped with the reason. With CI=true it fails instead.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from testbed.control.substrates.engine import image_name
from tests.support.command import chromium
from tests.support.quiet import QuietMachine
from tests.support.rank_pool import RankPool
from tests.support.turns import Turn, alone

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit SIGINT as ignored
os.environ.setdefault("TESTBED_SHARE", "1")  # tests start runs in parallel, so they do not wait for the machine's lock
settings.register_profile("testbed", deadline=None)  # the machine may be busy, so slow is not a failure
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "testbed"))


def _missing_for_gloo() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def _missing_for_net() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@functools.cache
def _missing_for_docker() -> str | None:
    if shutil.which("docker") is None:
        return "docker not found: make engine"
    needed = {"an engine that answers": ["docker", "info"], "Compose v2": ["docker", "compose", "version"]}
    missing = [
        what for what, argv in needed.items() if subprocess.run(argv, capture_output=True, timeout=60).returncode
    ]
    return f"{' and '.join(missing)} missing: make engine" if missing else None


def _missing_for_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if chromium() else "no Chromium found: apt-get install chromium"


def _missing_for_hosts() -> str | None:
    return _missing_for_docker() or (None if shutil.which("ssh-keygen") else "ssh-keygen not found: openssh-client")


def _missing_for_slurm() -> str | None:
    from tests.slurm.cluster import missing

    return _missing_for_gloo() or missing()


def _missing_for_netem() -> str | None:
    if shutil.which("linux.uml") is None:
        return "user-mode Linux not found: apt-get install user-mode-linux"
    return _missing_for_gloo() or _missing_for_net()


GROUPS = {
    "gloo": _missing_for_gloo,
    "net": _missing_for_net,
    "docker": _missing_for_docker,
    "hosts": _missing_for_hosts,
    "browser": _missing_for_browser,
    "slurm": _missing_for_slurm,
    "netem": _missing_for_netem,
}


POOLED = ("test_algorithms", "test_check_gloo", "test_codecs_gloo", "test_pipeline_gloo", "test_training")
LONGEST_FIRST = ("test_grade_docker.py", "hosts", "slurm", "netem", "pools", "docker", "gloo", "net", "browser")


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one worker: those of a file, or of all files that share what takes long to start.

    These are the hosts of tests/hosts, and the pools of ranks for some files of tests/gloo.
    """
    file = Path(nodeid.partition("::")[0])
    if file.parent.name == "hosts" and "unit" not in file.parts:
        return "hosts"
    return "pools" if file.stem in POOLED and file.parent.name == "gloo" else file.as_posix()


def order_of(scope: str) -> int:
    """The longest scopes have the lowest numbers and begin first, so that no worker is alone with one at the end."""
    parts = Path(scope).parts
    found = (number for number, name in enumerate(LONGEST_FIRST) if name in parts and "unit" not in parts)
    return next(found, len(LONGEST_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # scopes begin in the order in which their first tests were collected
    return LongestFirst(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In workers the longest scopes come first, and files in which every test is `quiet` last, one after the other."""
    if not hasattr(config, "workerinput"):
        return
    mixed = {item.path for item in items if not _quiet(item)}
    items.sort(key=lambda item: (item.path not in mixed, order_of(scope_of(item.nodeid))))


def _quiet(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("quiet") is not None


TURN = Turn()
MACHINE = QuietMachine()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run tests marked `quiet` while no other worker runs one; those that follow each other share one such turn.

    Other programs than these tests may run beside: see `pytest_runtest_setup`.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    TURN.take(alone=_quiet(item))
    try:
        return (yield)
    finally:
        if not (_quiet(item) and _quiet(nextitem)):
            TURN.end()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long the tests of each folder took, added up over the workers."""
    seconds: dict[str, float] = {}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
            seconds[folder] = seconds.get(folder, 0.0) + report.duration
    if len(seconds) > 1:
        terminalreporter.section("minutes by folder, over all workers")
        for folder, sum_s in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{sum_s / 60:6.1f}  {folder}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test whose group cannot run here. One that is marked `quiet` waits until other work is little."""
    for group, missing in GROUPS.items():
        reason = missing() if item.get_closest_marker(group) else None
        if reason and os.environ.get("CI") == "true":
            pytest.fail(f"group {group} cannot run: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"group {group}: {reason}")
    share = MACHINE.wait() if _quiet(item) else None
    if share is not None:
        item.add_report_section("setup", "machine", f"{share:.0%} of the processors were in use before this test")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)` returns a pool of four processes in one Gloo group on loopback, which is started once per session."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools or pools[size].broken:
            _close(pools.pop(size, None))
            pools[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return pools[size]

    try:
        yield get
    finally:
        for pool in pools.values():
            _close(pool)


def _close(pool: RankPool | None) -> None:
    if pool:
        pool.close()


@pytest.fixture(scope="session")
def image(repository: Path) -> str:
    """Build the image of the present code and return its name. A rebuild after a change takes seconds."""
    with alone("image"):  # two workers would build it twice
        subprocess.run([repository / "docker" / "image.sh"], env=os.environ | {"CI": "true"}, timeout=900, check=True)
    return image_name()


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
