"""How a rank's failure is told: once for people, once for scripts."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import traceback

from testbed.rank.group import is_lost_peer
from testbed.rank.recorder import Recorder
from testbed.results.records import Error
from testbed.spec.errors import PeerLost, TestbedError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no quota, no larger file


def fail(error: Exception, rank: int, recorder: Recorder) -> Error:
    """Print the reason and make it the last record; `code` is what the process ends with."""
    record = describe(error, rank)
    with contextlib.suppress(OSError):  # a full disk must not hide the exit code
        print(record.message, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        recorder.write(record)
    return record


class Ending:
    """A rank ends once, whichever of its threads learns first that it must."""

    def __init__(self, rank: int, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self._begun = threading.Lock()

    def because(self, error: Exception) -> int:
        """Tell it; the exit code. For a second thread there is nothing left to say: it waits for the process's end."""
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()
        return fail(error, self.rank, self.recorder).code


def describe(error: Exception, rank: int) -> Error:
    """The sentence and the exit code; what nobody foresaw is printed with its traceback."""
    if isinstance(error, TestbedError):
        failed_rank = error.failed_rank if isinstance(error, PeerLost) else None
        return Error(code=error.exit_code, message=str(error), failed_rank=failed_rank, at=time.monotonic())
    if isinstance(error, RuntimeError) and is_lost_peer(error):
        return Error(code=PeerLost.exit_code, message=f"rank {rank} lost a peer: {error}", at=time.monotonic())
    if isinstance(error, OSError) and error.errno in FULL:
        message = f"nothing can be written any more: {error.strerror}. Free some space, then --resume"
        return Error(code=TestbedError.exit_code, message=message, at=time.monotonic())
    with contextlib.suppress(OSError):
        traceback.print_exc()
    return Error(code=TestbedError.exit_code, message=f"{type(error).__name__}: {error}", at=time.monotonic())
