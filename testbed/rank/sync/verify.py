"""Verify: is what a mode made of the ranks' numbers their mean? Differences, what explains them, and the message.

`check.py` uses this on known numbers before training. SampledMethod uses it on the gradients of the run: known numbers
are few, so a mistake that depends on the full length of a buffer shows only there.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import OwnMethod
from testbed.spec.errors import UsageError, refuse
from testbed.spec.mode import ALGORITHMS, SyncMode
from testbed.spec.own_files import own_method

MAX_BUFFERS = 16  # that are sampled
PLACES = 16  # in each of them, at equal distances; and at the ends of some shards
SHARDS = 4
WrongNumbers = dict[str, Any]  # what is wrong on one rank, as JSON; empty: nothing


def rounding(eps: float, n: int) -> float:
    """The largest relative error of a mean of n numbers: n - 1 additions and a division, each rounded, in any order."""
    return 2 * n * eps


def differs(found: Tensor, expected: Tensor, own: Tensor, most: Tensor | float, n: int) -> WrongNumbers:
    """Return which numbers differ by more than `most` from the expected ones; all are flat, in float64."""
    is_wrong = ~((found - expected).abs() <= most)  # true for NaN, too
    count = int(is_wrong.sum())
    if not count:
        return {}
    first = int(is_wrong.nonzero()[0])
    slack = n * (most[is_wrong] if isinstance(most, Tensor) else most)
    return {
        "expected": float(expected[first]),
        "found": float(found[first]),
        "number": first,
        "wrong": count,
        "of": len(found),
        "hint": _hint(found[is_wrong], expected[is_wrong], own[is_wrong], slack, n),
    }


def _hint(found: Tensor, expected: Tensor, own: Tensor, most: Tensor | float, n: int) -> str:
    """Return the mistake that explains all wrong numbers; empty if no known mistake does."""

    def are(values: Tensor) -> bool:
        return bool(((found - values).abs() <= most).all())

    if not bool(found.isfinite().all()):
        return "some are not finite"
    if are(n * expected):
        return f"{n} times the mean: the sum was not divided by N"
    if are(expected / n):
        return f"1/{n} of the mean: it was divided by N twice"
    if are(own):
        return "this rank's own numbers: nothing was averaged there"
    return "zero" if are(torch.zeros_like(found)) else ""


def agree_on(mode: SyncMode, numbers: str, found: WrongNumbers, group: Group, key: str) -> None:
    """Exchange what each rank `found`. If a rank has wrong numbers, raise the same SpecError on all ranks."""
    answers = [json.loads(text) for text in group.all_gather_text(key, json.dumps(found))]
    wrong = {rank: answer for rank, answer in enumerate(answers) if answer}
    if wrong:
        raise _refusal(mode, numbers, wrong, group.size)


def _refusal(mode: SyncMode, numbers: str, wrong: dict[int, WrongNumbers], n: int) -> UsageError:
    rank, first = next(iter(wrong.items()))
    ranks = "all ranks" if len(wrong) == n else ", ".join(f"rank {each}" for each in wrong)
    requested = "each rank's own numbers" if mode.silent else f"the mean of {n} ranks"
    values = f"expected {first['expected']:.6g}, found {first['found']:.6g}"
    hint = f" ({first['hint']})" if first["hint"] else ""
    extent = f"of {first['of']} numbers {first['wrong']} are wrong on rank {rank}, the first is number"
    rule = f"wrong on {ranks}: requested {requested} of {numbers}, {values}{hint}; {extent} {first['number']}"
    own = f"Fix mean_ in {own_method(mode.algorithm).path} (docs/modes.md), then try again."
    built_in = "Use another mode, and report this: it is a mistake of the testbed or of torch."
    return refuse("mode", str(mode), rule, built_in if mode.algorithm in ALGORITHMS else own)


# --- the first exchange of a user's method ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Some numbers of one buffer before and after a method averaged it."""

    dtype: torch.dtype
    before: Tensor
    after: Tensor


class SampledMethod:
    """A user's method that keeps samples of what it averaged until `verify` has compared them with the mean."""

    def __init__(self, mode: SyncMode, method: OwnMethod) -> None:
        self.mode, self.method = mode, method
        self._samples: list[Sample] = []
        self._verified = False

    def __call__(self, buffer: Tensor, group: Group) -> None:
        if self._verified or len(self._samples) >= MAX_BUFFERS or not len(buffer):
            return self.method(buffer, group)
        places = torch.tensor(sample_places(len(buffer), group.size))
        before = buffer[places].double()
        self.method(buffer, group)
        self._samples.append(Sample(buffer.dtype, before, buffer[places].double()))
        return None

    def verify(self, group: Group) -> None:
        """Compare the samples with the float64 mean of all ranks', once. Raises the same SpecError on all ranks."""
        if self._verified or not self._samples:
            return
        self._verified = True
        samples, self._samples = self._samples, []
        before = torch.cat([sample.before for sample in samples])
        texts = group.all_gather_text("samples", base64.b64encode(before.numpy().tobytes()).decode())
        everyone = torch.stack([_unpack(text) for text in texts])
        found, expected, largest = torch.cat([s.after for s in samples]), everyone.mean(0), everyone.abs().amax(0)
        info = torch.finfo(max((s.dtype for s in samples), key=lambda dtype: torch.finfo(dtype).eps))
        relative = max(rounding(info.eps, group.size), self.method.tolerance)
        most = relative * largest + group.size * info.tiny * info.eps  # the last: rounding of numbers near zero
        sane = largest * group.size < info.max  # a loss that has diverged is no fault of the method
        wrong = differs(found[sane], expected[sane], before[sane], most[sane], group.size)
        agree_on(self.mode, "gradients of the first exchange", wrong, group, "samples/wrong")


def sample_places(length: int, n: int) -> list[int]:
    """Indices at equal distances, the first and the last, and both sides of some ends of shards."""
    even = [k * (length - 1) // (PLACES - 1) for k in range(PLACES)]
    ends = [length * k // n - side for k in range(1, min(n, SHARDS)) for side in (0, 1)]
    return sorted({min(max(place, 0), length - 1) for place in (*even, *ends)})


def _unpack(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float64)
