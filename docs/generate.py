"""Write what is made from rows in testbed/spec: tables in docs/modes.md and docs/faults.md, the list in .env.example.

generate.py            write these files
generate.py --check    exit with 1 if one of them is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.spec.fault import FAULT_KINDS
from testbed.spec.mode import ALGORITHMS, CODECS, SCHEDULES, SyncMode, codecs_of

ROOT = Path(__file__).parents[1]


def algorithms() -> list[str]:
    rows = [f"| `{name}` | {row.does} | {row.time} |" for name, row in ALGORITHMS.items()]
    return ["| algorithm | what it does | time |", "| --- | --- | --- |", *rows]


def schedules() -> list[str]:
    return [f"- `{name}`: {does}" for name, does in SCHEDULES.items()]


def codecs() -> list[str]:
    takes = {name: codecs_of(SyncMode.parse(name)) for name in ALGORITHMS}
    lines = ["| codec | what is sent | bytes | with |", "| --- | --- | ---: | --- |"]
    for codec in CODECS.values():
        takers = [f"`{name}`" for name, examples in takes.items() if codec.example in examples]
        others = [f"`{name}`" for name, examples in takes.items() if codec.example not in examples]
        allowed = ", ".join(takers) if len(takers) < len(others) else f"all but {', '.join(others)}"
        lines.append(f"| `{codec.example}` | {codec.does} | {codec.bytes} | {allowed} |")
    return lines


def faults() -> list[str]:
    everywhere = set().union(*(kind.substrates for kind in FAULT_KINDS.values()))
    lines = ["| fault | what happens | substrates |", "| --- | --- | --- |"]
    for kind in FAULT_KINDS.values():
        where = "all" if set(kind.substrates) == everywhere else ", ".join(kind.substrates)
        lines.append(f"| `{kind.example}` | {kind.does} | {where} |")
    return lines


def modes_page(text: str) -> str:
    """Return the text of docs/modes.md with new tables between its marks."""
    return _between_marks("docs/modes.md", text, (algorithms, schedules, codecs))


def faults_page(text: str) -> str:
    """Return the text of docs/faults.md with a new table between its marks."""
    return _between_marks("docs/faults.md", text, (faults,))


def _between_marks(name: str, text: str, parts: Sequence[Callable[[], list[str]]]) -> str:
    for made in parts:
        mark = re.compile(rf"(<!-- begin {made.__name__} [^\n]*-->\n).*?(<!-- end {made.__name__} -->\n)", re.S)
        text, count = mark.subn(lambda m, made=made: m[1] + "\n".join([*made(), ""]) + m[2], text)
        if count != 1:
            raise SystemExit(f"{name}: {count} places for {made.__name__}, there must be one. Restore its marks.")
    return text


def env_example(text: str) -> str:
    """Return the text of .env.example with a new list of algorithms after MODE."""
    line = f"MODE=ring            # {' '.join(ALGORITHMS)}; all: testbed modes"
    return re.sub(r"^MODE=.*$", line, text, flags=re.M)


PAGES = {"docs/modes.md": modes_page, "docs/faults.md": faults_page, ".env.example": env_example}


def main() -> None:
    stale = []
    for name, made in PAGES.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = made(before)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(f"{', '.join(stale)}: out of date with testbed/spec. Run make docs.")
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    main()
