"""Codec: what travels in place of a gradient. Its word is a name and, for some, a number: fp16, topk:0.01."""

from __future__ import annotations

import re
from dataclasses import dataclass

from testbed.spec.errors import refuse


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What the vocabulary knows of a codec; the code that does it lives in rank/sync."""

    does: str
    example: str  # a word of it
    summable: bool  # what travels can be added up on its way, so that any algorithm can carry it
    number: str = ""  # the pattern of its number, where it has one
    most: float = 0  # the largest number
    in_ddp: bool = False  # torch has a hook for it


CODECS: dict[str, Codec] = {
    "fp16": Codec(does="16-bit floats: half the bytes", example="fp16", summable=True, in_ddp=True),
    "bf16": Codec(
        does="16-bit floats with the range of 32: half the bytes", example="bf16", summable=True, in_ddp=True
    ),
    "int8": Codec(
        does="8-bit integers, one scale a shard, rounded at random: a quarter of the bytes",
        example="int8",
        summable=False,
    ),
    "topk": Codec(
        does="the largest fraction F and where they were, the rest is kept for later: F N of the bytes",
        example="topk:0.01",
        summable=False,
        number=r"\d?\.\d{1,6}|\d",
        most=1,
    ),
    "powersgd": Codec(
        does="each matrix as a product of rank R, the rest is kept for later",
        example="powersgd:2",
        summable=True,
        number=r"\d{1,3}",
        most=999,
        in_ddp=True,
    ),
}


def read_codec(word: str, text: str) -> tuple[str, float | None] | None:
    """Name and number of a codec's word; None where it is no codec. `text` is the whole mode, for the refusal."""
    name, colon, digits = word.partition(":")
    codec = CODECS.get(name)
    if codec is None:
        return None
    if not codec.number:
        if colon:
            raise refuse("mode", text, f"{name} takes no number", f"Write {name}.")
        return name, None
    if not re.fullmatch(codec.number, digits, re.ASCII) or not 0 < float(digits) <= codec.most:
        kind = "a fraction" if codec.most == 1 else "a whole number"
        rule = f"{name} needs {kind} greater than 0 and at most {codec.most:g}"
        raise refuse("mode", text, rule, f"Write e.g. {codec.example}.")
    return name, float(digits)


def codec_word(name: str, number: float | None) -> str:
    """The one spelling of a codec, which `read_codec` reads back."""
    return name if number is None else f"{name}:{f'{number:.6f}'.rstrip('0').rstrip('.')}"
