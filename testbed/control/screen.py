"""What all commands print with, and the options they share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console(markup=False, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
