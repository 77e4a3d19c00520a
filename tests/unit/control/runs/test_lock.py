"""One controller per folder; a dead one's lock is taken over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.control.runs.locks import held
from testbed.spec.errors import Unavailable

HOLDER = (
    "import sys, time; from pathlib import Path; from testbed.control.runs.locks import held\n"
    "with held(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)\n"
)


def start_holder(path: Path) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.stdout.close()
    return holder


def test_a_second_controller_is_refused_with_the_firsts_name_and_a_dead_ones_lock_is_free(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "quick")
    try:
        with pytest.raises(Unavailable, match=rf"quick: process {holder.pid} is at it"):
            with held(tmp_path / "quick"):
                pass
        with held(tmp_path / "other"):
            pass
    finally:
        holder.kill()
        holder.wait(10)
    assert (tmp_path / ".quick.lock").exists()  # as a killed controller leaves it
    with held(tmp_path / "quick"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_free_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            with held(tmp_path / "x"):
                raise RuntimeError
    assert list(tmp_path.iterdir()) == []
