"""testbed measures what it costs to keep N copies of a model in step, by a chosen method, on a chosen network.

    run = testbed.run(mode="ring", nodes=4, rate="200mbit")   train once, on the best substrate that is available
    runs = testbed.sweep("experiments/quick.toml")             every cell of an experiment
    runs = testbed.load("runs/quick")                          what earlier runs measured
docs/api.md describes them. They are imported on first use, because ranks import this package without control/.

Folders. tests/unit/test_imports.py checks which of them may import which:
  spec/     what is requested: modes, links, runs, experiments
  results/  what was measured: records, receipts, summaries, tables
  net/      turns a link into tc argument lists; measures the network
  data/     fetches a data set and verifies it
  rank/     runs on every node: the training loop and the synchronisation modes
  control/  runs on the user's machine, without torch: command line, sweeps, substrates
  attach/   runs a user's own script on every node, and observes it
  report/   turns run folders into tables, figures and a page
  predict/  calculates from runs what other networks and numbers of nodes would cost
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.control.api import Run, Runs, load, run, sweep

__version__ = "0.2.0"
__all__ = ["Run", "Runs", "__version__", "load", "run", "sweep"]


def __getattr__(name: str) -> Any:
    """Import the API on first use. Raises AttributeError for a name that it does not have."""
    if name in __all__:
        found = getattr(importlib.import_module("testbed.control.api"), name)
        return found if isinstance(found, type) else _called_from_python(found)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _called_from_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with messages that name its arguments; the command line calls it without this."""
    from testbed.spec.words import Place, reading

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with reading(Place.PYTHON):
            return function(*arguments, **keywords)

    return call
