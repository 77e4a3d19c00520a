"""What all tests share: which groups this machine can run, and pools of real rank processes.

A group that cannot run here is skipped with the reason; with CI=true it fails, so that nothing is left out unseen.
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

signal.signal(signal.SIGINT, signal.default_int_handler)  # or children of a background job would be deaf to it
os.environ.setdefault("TESTBED_SHARE", "1")  # tests start runs beside each other
settings.register_profile("testbed", deadline=None)  # this machine is shared: slow is no failure
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "testbed"))


def _lacks_for_gloo() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def _lacks_for_net() -> str | None:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@functools.cache  # asked once, not before every test
def _lacks_for_docker() -> str | None:
    if shutil.which("docker") is None:
        return "docker not found: make engine"
    asked = {"an engine that answers": ["docker", "info"], "Compose v2": ["docker", "compose", "version"]}
    missing = [what for what, argv in asked.items() if subprocess.run(argv, capture_output=True, timeout=60).returncode]
    return f"{' and '.join(missing)} missing: make engine" if missing else None


def _lacks_for_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if chromium() else "no Chromium found: apt-get install chromium"


def _lacks_for_hosts() -> str | None:
    return _lacks_for_docker() or (None if shutil.which("ssh-keygen") else "ssh-keygen not found: openssh-client")


GROUPS = {
    "gloo": _lacks_for_gloo,
    "net": _lacks_for_net,
    "docker": _lacks_for_docker,
    "hosts": _lacks_for_hosts,
    "browser": _lacks_for_browser,
}


TOGETHER = {"gloo": "ranks", "net": "ranks", "docker": "engine", "hosts": "engine"}  # folders that one worker keeps


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers (make test): ranks and namespaces stay with one, the engine with one, other files with either."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((TOGETHER[part] for part in Path(file).parts if part in TOGETHER), file)

    return ByFolder(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    beside = hasattr(item.config, "workerinput")  # another worker runs tests, too
    with take_turn(alone=item.get_closest_marker("quiet") is not None) if beside else nullcontext():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for group, lacks in GROUPS.items():
        reason = lacks() if item.get_closest_marker(group) else None
        if reason and os.environ.get("CI") == "true":
            pytest.fail(f"group {group} cannot run: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"group {group}: {reason}")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)` is a pool of four processes in one Gloo group on loopback, started once for the whole session."""
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
    """The image of the code as it is now; a rebuild after a change takes seconds."""
    subprocess.run([repository / "docker" / "image.sh"], env=os.environ | {"CI": "true"}, timeout=900, check=True)
    return "testbed:latest"


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
