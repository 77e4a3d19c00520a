"""How a rank's failure is told: once for people, once for scripts."""

from __future__ import annotations

import sys
import traceback

from testbed.rank.recorder import Recorder
from testbed.spec.errors import RankFailed, TestbedError, UsageError
from testbed.spec.records import Error


def fail(error: Exception, rank: int, recorder: Recorder) -> Error:
    """Print the reason and make it the last record; `code` is what the process ends with."""
    record = describe(error, rank)
    print(record.message, file=sys.stderr, flush=True)
    recorder.write(record)
    return record


def describe(error: Exception, rank: int) -> Error:
    """The sentence and the exit code; what nobody foresaw is printed with its traceback."""
    if isinstance(error, TestbedError):
        return Error(code=error.exit_code, message=str(error))
    if isinstance(error, RuntimeError) and "finished reduction in the prior iteration" in str(error):
        way_out = "Use allreduce or ring, where such a parameter counts as zero."
        message = f"mode ddp: the model has parameters that get no gradient, which DDP refuses. {way_out}"
        return Error(code=UsageError.exit_code, message=message)
    if isinstance(error, RuntimeError) and _is_lost_peer(error):
        return Error(code=RankFailed.exit_code, message=f"rank {rank} lost a peer: {error}")
    traceback.print_exc()
    return Error(code=TestbedError.exit_code, message=f"{type(error).__name__}: {error}")


def _is_lost_peer(error: RuntimeError) -> bool:
    """Gloo and the store raise plain RuntimeErrors whose texts are all they tell."""
    text = str(error).lower()
    return any(sign in text for sign in ("gloo", "connection", "timed out", "timeout", "socket", "broken pipe"))
