"""Write what is made from the rows in testbed/spec/mode.py: the tables in docs/modes.md, the list in .env.example.

generate.py            write both files
generate.py --check    exit with 1 if one of them is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

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


def modes_page(text: str) -> str:
    """Return the text of docs/modes.md with new tables between its marks."""
    for made in (algorithms, schedules, codecs):
        mark = re.compile(rf"(<!-- begin {made.__name__} [^\n]*-->\n).*?(<!-- end {made.__name__} -->\n)", re.S)
        text, count = mark.subn(lambda m, made=made: m[1] + "\n".join([*made(), ""]) + m[2], text)
        if count != 1:
            raise SystemExit(
                f"docs/modes.md: {count} places for {made.__name__}, there must be one. Restore its marks."
            )
    return text


def env_example(text: str) -> str:
    """Return the text of .env.example with a new list of algorithms after MODE."""
    line = f"MODE=ring            # {' '.join(ALGORITHMS)}; all: testbed modes"
    return re.sub(r"^MODE=.*$", line, text, flags=re.M)


def main() -> None:
    stale = []
    for name, made in (("docs/modes.md", modes_page), (".env.example", env_example)):
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = made(before)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(f"{', '.join(stale)}: out of date with testbed/spec/mode.py. Run make docs.")
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    main()
