"""What all tests share: which groups this machine can run, how two workers share it, and pools of rank processes.

A test whose group cannot run here is skipped with the reason. With CI=true it fails instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.command import chromium
from tests.support.rank_pool import RankPool
from tests.support.turns import take_turn

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


GROUPS = {
    "gloo": _missing_for_gloo,
    "net": _missing_for_net,
    "docker": _missing_for_docker,
    "hosts": _missing_for_hosts,
    "browser": _missing_for_browser,
}


SCOPES = {"gloo": "ranks", "net": "ranks", "docker": "engine", "hosts": "engine"}  # folder: one worker runs a scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With two workers (make test), one runs all tests with ranks and namespaces, one all tests with the engine.

    Other files go to either of them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((SCOPES[part] for part in Path(file).parts if part in SCOPES), file)

    return ByFolder(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test marked `quiet` while no other worker runs one."""
    parallel = hasattr(item.config, "workerinput")
    with take_turn(alone=item.get_closest_marker("quiet") is not None) if parallel else nullcontext():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for group, missing in GROUPS.items():
        reason = missing() if item.get_closest_marker(group) else None
        if reason and os.environ.get("CI") == "true":
            pytest.fail(f"group {group} cannot run: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"group {group}: {reason}")


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
    subprocess.run([repository / "docker" / "image.sh"], env=os.environ | {"CI": "true"}, timeout=900, check=True)
    return "testbed:latest"


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
