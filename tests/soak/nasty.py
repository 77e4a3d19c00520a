"""What strangers put into files, and into the place of files."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

LIVE = "<script>alert(1)"  # of a page it must be text
OCTAL = r"\042\076\074script\076alert(1)\074/script\076"  # the same behind a quote, where a template is made of it
OBEYED = "\x1b]0;owned\x07\x1b[31m"  # by a terminal

NASTY: list[Any] = [
    *("../../escape", "/etc/passwd", "..", ".", "", "a/../../b", "~root/x", "name\n../x", "\0", "x" * 100_000),
    *("$(touch stray)", "`touch stray`", "; touch stray", "| sh", "&& touch stray", "-rf", "--help", "%s%n", "{{7*7}}"),
    *(f"{LIVE}</script>", OCTAL, r"\q", r"$\x$", OBEYED, "\u202egnp.exe", "é" * 70),
    *("\x1b[31m", "NaN", "nan", "inf", "1e309", "0x10", "007"),
    *(-1, 0, 2**31, 2**63, 10**30, -0.0, 1e308, True, None, [], {}, [[]], [{}], {"a": {"b": 1}}, [None] * 2000),
    *("ring/" * 50, "ring/bucket:0", "ring/bucket:9" + "9" * 40 + "GiB", "ddp/flat/overlap", "kill:rank0@step1"),
    *(
        ["kill:rank99@step1"],
        ["pause:rank1@step1+" + "9" * 99 + "s"],
        ["cut:" * 100],
        [1, 2],
        ["kill:rank?@step?"] * 99,
    ),
]


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or insert."""
    for _ in range(rng.randrange(1, 12)):
        at = rng.randrange(len(data) + 1)
        data = rng.choice(
            (
                data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at + 1 :],
                data[:at],
                data[:at] + data[at // 2 : at] * 2 + data[at:],
                data[:at] + rng.choice((b"[", b"{", b'"', b"\0", b"\xff", b"=", b"9" * 5000, b"[" * 3000)) + data[at:],
            )
        )
    return data


def place(path: Path, data: bytes, rng: random.Random, links: bool = True) -> None:
    """Mostly a file; sometimes a folder, a pipe, a link or something huge."""
    odd = rng.random() if links else 1.0
    if odd < 0.03:
        path.mkdir()
    elif odd < 0.06:
        os.mkfifo(path)
    elif odd < 0.09:
        path.symlink_to("/dev/zero")
    elif odd < 0.12:
        path.write_bytes(data)
        os.truncate(path, 3 << 30)
    else:
        path.write_bytes(data)
