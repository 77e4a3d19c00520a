"""The signal by which a controller tells a rank that the CPU quota of its node applies now.

Before the signal a rank has no quota: it imports torch, connects and builds the model. It takes no step before the
signal. Both the controller and the ranks use this file. It imports the standard library only, because a rank must call
`block` before it imports anything that starts threads.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "TESTBED_QUOTA_LATER"  # in the environment of a rank that has to wait for the signal
SIGNAL = signal.SIGUSR2


def block() -> None:
    """Keep the signal pending until `wait`. Call this before any thread is started: all threads must block it."""
    if os.environ.get(VARIABLE):
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def wait(timeout_s: float) -> bool:
    """Wait until the quota applies, and return True; at once if there is no quota. Return False after `timeout_s`."""
    return not os.environ.get(VARIABLE) or signal.sigtimedwait({SIGNAL}, timeout_s) is not None
