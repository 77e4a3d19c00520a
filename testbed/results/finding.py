"""What a rule says about a user's script: a line of the table, an entry of the page, summary.json and `--json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

Severity = Literal["error", "cost", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "cost", "note")
Text = Annotated[str, Field(max_length=16_384)]


@dataclass(frozen=True)
class Finding:
    """One thing that a script does. `error`: it trains another model than it seems to; `cost`: seconds of a step."""

    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")  # of summary.json

    rule: Text
    severity: Severity
    title: Text  # one sentence
    evidence: Text  # the numbers
    fix: Text
    sure: Text  # how sure it is
    refuted_by: Text  # what would refute it
    site: Text = ""  # file and line of the script; empty if none is known
    seconds: float | None = None  # of a step, where they are known
