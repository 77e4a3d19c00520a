"""Readiness: which gradients backward has made, and so which buffers may leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Parameter


class Readiness:
    """Counts gradients as backward makes them and launches groups in their order, the same on all ranks."""

    def __init__(self, groups: Sequence[Sequence[Parameter]], launch: Callable[[int], None]) -> None:
        self.launch = launch
        self.members = [{id(p) for p in group} for group in groups]
        self.parameters = {id(p): p for group in groups for p in group}
        self.paused = False
        self.start()

    def start(self) -> None:
        """A step begins: nothing is ready."""
        self.missing = [set(members) for members in self.members]
        self.next = 0

    def ready(self, parameter: Parameter) -> None:
        """This gradient is complete, unless more passes of the same step will add to it."""
        if self.paused:
            return
        for missing in self.missing[self.next :]:
            missing.discard(id(parameter))
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._launch_next()

    def absent(self) -> list[Parameter]:
        """Those that backward has left out."""
        ids = {key for missing in self.missing[self.next :] for key in missing}
        return [self.parameters[key] for key in ids]

    def finish(self) -> None:
        """Backward is over: a parameter that got no gradient counts as zero, so the rest can go."""
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.launch(self.next)
        self.next += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
