"""Compare synchronisation modes from Python: run them, print the table, and how long ranks waited for communication.

python examples/compare_modes.py                       # plain processes: no root, no Docker, no shaped network
python examples/compare_modes.py --on netns --rate 200mbit --nodes 4    # as root: a network of 200 Mbit/s
"""

from __future__ import annotations

import argparse
import statistics

import testbed


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare synchronisation modes.")
    parser.add_argument("--on", default="process", help="substrate: auto, process, netns, compose")
    parser.add_argument("--rate", help="rate of every link, each way, e.g. 200mbit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    runs = testbed.sweep(
        {
            "name": "compare-modes",
            "title": "Which mode is the fastest here?",
            "base": {
                "model": "lenet5",
                "data": {"name": "synthetic", "test_subset": 256},
                "batch_per_rank": 16,
                "nodes": options.nodes,
                "steps": options.steps,
                "link": {"rate": options.rate} if options.rate else {},
            },
            "axes": {"mode": ["gather", "ring", "ddp"]},
        },
        on=options.on,
    )
    for row in runs.table:
        print(f"{row['mode']:8} {row['s/iter']} s/iter")
    for run in runs:
        steps = run.steps  # one list per column; pandas.DataFrame(steps) works, too
        counted = [k for k, step in enumerate(steps["step"]) if step >= run.spec.warmup]
        blocked = statistics.fmean(steps["blocked"][k] / steps["total"][k] for k in counted)
        print(f"{run.spec.mode!s:8} waits for communication {100 * blocked:.0f} % of a step")
    fastest = min(runs, key=lambda run: run.summary.seconds_per_step or float("inf"))
    print(f"fastest: {fastest.spec.mode}, in {fastest.folder}")


if __name__ == "__main__":
    main()
