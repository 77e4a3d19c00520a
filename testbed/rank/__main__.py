"""`python -m testbed.rank`: one rank, for Compose, torchrun, srun, hosts and the controller alike (see request.py)."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable

from testbed.spec import quota_signal

quota_signal.block()  # before the imports: numpy starts threads, and the signal would end the process in one of them

from testbed.rank import watchdog  # noqa: E402
from testbed.rank.request import Request, read_request  # noqa: E402
from testbed.spec.errors import TestbedError  # noqa: E402
from testbed.spec.words import set_place  # noqa: E402

log = logging.getLogger("testbed.rank")


def main() -> int:
    """Read the request, run it, return the exit code."""
    watchdog.raise_interrupted()
    log_to_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # messages of the testbed replace the store's warnings
    try:
        request = read_request(sys.argv[1:], os.environ)
        set_place(request.place)
        return _import_run_rank()(request)
    except TestbedError as error:
        log.error(error)
        return error.exit_code


def _import_run_rank() -> Callable[[Request], int]:
    """Import torch with the rest of the rank, and return `run_rank`.

    The import takes a second, so a bad request is refused before it. Garbage collection is off meanwhile, because the
    import makes hundreds of thousands of objects and frees none of them. This saves a tenth of the time.
    """
    gc.disable()
    try:
        from testbed.rank.run import run_rank
    finally:
        gc.enable()
    return run_rank


def log_to_streams() -> None:
    """Log plain lines: errors to stderr, everything else to stdout. A full disk must not end the rank here."""
    logging.raiseExceptions = False
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.ERROR)
    err.setLevel(logging.ERROR)
    root = logging.getLogger("testbed")
    root.setLevel(logging.INFO)
    for handler in (out, err):
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)


if __name__ == "__main__":
    code = main()
    watchdog.flush()
    os._exit(code)  # a Gloo thread that still waits for a lost rank must not keep the process alive
