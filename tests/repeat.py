"""`make repeat`: run the tests again and again, to find those that fail now and then.

    make repeat                                ten times, every second time beside a busy core
    make repeat ARGS="--times 3 tests/unit"    other arguments are those of pytest

Each result is appended to results/repeat.jsonl with its commit and the load before it. It resumes: results of the
present commit and the same arguments count, also those that are red. At the end it prints how many are green.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.provenance import ROOT, code_commit, commit_of_all, current, machine

RESULTS = ROOT / "results" / "repeat.jsonl"
TESTED = (".", ":(exclude)results/repeat.jsonl")  # tests read documents, the Makefile and results, too
WORKERS = ("--numprocesses", "3")  # as `make test`


def main() -> int:
    """Return exit code 1 if one of the results at this commit is red."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make repeat", description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=10, help="how many results there shall be; 10 by default")
    options, arguments = parser.parse_known_args()
    done = of_this_commit(read(RESULTS), code_commit(*TESTED), arguments)
    while len(done) < options.times:
        beside = len(done) % 2 == 1
        print(f"[{len(done) + 1}/{options.times}]{' beside a busy core' if beside else ''}", flush=True)
        result = run(arguments, beside)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        done.append(result)
        print(sentence(result), flush=True)
    red = [result for result in done if not green(result)]
    print(f"{len(done) - len(red)} of {len(done)} green at {code_commit(*TESTED)}; all results are in {RESULTS}")
    for name in sorted({name for result in red for name in result["failed"]}):
        print(f"  {sum(name in result['failed'] for result in red)} times: {name}")
    return 1 if red else 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def of_this_commit(results: Sequence[dict[str, Any]], commit: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Those that need not be repeated. Of a tree with uncommitted changes there are none."""
    return [each for each in results if current(each["commit"], commit) and each["arguments"] == list(arguments)]


def run(arguments: Sequence[str], beside: bool) -> dict[str, Any]:
    """One run of the tests."""
    before, load, begun = code_commit(*TESTED), os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, busy_core() if beside else nullcontext():
        xml = Path(folder) / "junit.xml"
        argv = [sys.executable, "-m", "pytest", "-q", *WORKERS, f"--junitxml={xml}", *arguments]
        code = subprocess.run(argv, cwd=ROOT, check=False).returncode
        if code == 2:  # pytest was interrupted
            raise KeyboardInterrupt
        counts = outcomes(xml) if xml.is_file() else {"tests": 0, "skipped": 0, "failed": ["pytest wrote no result"]}
    return {
        "commit": commit_of_all(before, code_commit(*TESTED)),
        "arguments": list(arguments),
        "machine": machine(),
        "load": round(load, 2),
        "beside": beside,
        "seconds": round(time.monotonic() - begun),
        "code": code,
        **counts,
    }


@contextmanager
def busy_core() -> Iterator[None]:
    """One process that never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def outcomes(xml: Path) -> dict[str, Any]:
    """How many tests ran and were skipped, and the names of those that failed."""
    cases = list(ElementTree.parse(xml).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in failed],
    }


def green(result: dict[str, Any]) -> bool:
    return result["code"] == 0 and not result["failed"]


def sentence(result: dict[str, Any]) -> str:
    verdict = "green" if green(result) else f"RED, exit code {result['code']}: {', '.join(result['failed'])}"
    return f"{verdict}; {result['tests']} tests, {result['skipped']} skipped, {result['seconds'] / 60:.1f} minutes"


if __name__ == "__main__":
    sys.exit(main())
