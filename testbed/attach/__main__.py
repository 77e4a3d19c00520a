"""Observe a script where Python ignores PYTHONPATH, e.g. with -I: python -I {attach} main.py --rank {rank}

`python -m testbed.attach main.py` does the same where testbed is installed. The script runs as with `python main.py`.
"""

from __future__ import annotations

import os
import runpy
import sys


def observe() -> None:
    """Install the observer as sitecustomize does. Do nothing if the observer is installed already or not requested."""
    here = os.path.dirname(os.path.abspath(__file__))
    if any(type(finder).__name__ == "_AfterTorch" for finder in sys.meta_path):
        return
    package = os.path.dirname(os.path.dirname(here))
    if package not in sys.path:
        sys.path.append(package)
    try:
        runpy.run_path(os.path.join(here, "inject", "sitecustomize.py"), run_name="testbed.attach.inject")
    except Exception as error:  # the script runs without the observer
        print(f"testbed: the script is not observed ({type(error).__name__}: {error})", file=sys.stderr)


def main() -> None:
    """Run the script that the first argument names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m testbed.attach SCRIPT [ARGUMENT ...]")
    observe()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
