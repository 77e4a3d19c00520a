"""What all commands print with, and the options they share."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from testbed.spec.errors import harmless


class Screen(Console):
    """A console that may be given strangers' words: names, reasons and titles come from files."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(harmless(each) if isinstance(each, str) else each for each in objects), **options)


console = Screen(markup=False, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
