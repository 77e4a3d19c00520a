"""The signal by which a controller tells a rank that the CPU quota of its node applies now.

Until then a rank starts without a quota: it imports torch, connects and builds the model. It takes no step before the
signal. Both sides use this file.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "TESTBED_QUOTA_LATER"  # in the environment of a rank that has to wait
SIGNAL = signal.SIGUSR2


def block() -> None:
    """Keep the signal pending until `wait`. Call it before any thread is started: they must block it too."""
    if os.environ.get(VARIABLE):
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def wait(timeout_s: float) -> bool:
    """Return True as soon as the quota applies, at once where there is none; False after `timeout_s`."""
    return not os.environ.get(VARIABLE) or signal.sigtimedwait({SIGNAL}, timeout_s) is not None
