"""testbed: what keeping N copies of a model in step really costs.

Rooms (imports point one way, `tests/unit/test_imports.py` proves it):
  spec/     shared words: modes, links, runs, experiments, records, tables
  net/      shared: a Link becomes tc argument lists; a probe becomes a receipt
  data/     shared: brings a data set to a machine, verified
  rank/     runs on every node: the one training loop
  control/  runs on the user's machine: CLI, sweeps, substrates; never imports torch
  report/   offline: run folders in, tables and pages out
"""

__version__ = "0.2.0"
