"""What rank 0 knows of a run without a controller, and how it sums up: receipt.json, summary.json, the table."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from testbed.net.probe import measure, probe_node, receipt_of
from testbed.rank.asked import Asked
from testbed.results.conclude import Summary, summarise
from testbed.results.folder import RunFolder, write_whole
from testbed.results.receipt import Receipt
from testbed.results.records import Error
from testbed.results.table import (
    caption,
    format_table,
    left_out,
    table,
)
from testbed.spec.errors import Interrupted, NetworkInvalid, PeerLost, ProbeError, RankFailed
from testbed.spec.run import RunSpec

if TYPE_CHECKING:
    import torch.distributed as dist

HEARSAY = 2.0  # seconds for the others to say why they failed


class Conclusion:
    """Gathers facts while the run lives; only rank 0 writes them."""

    def __init__(self, asked: Asked, spec: RunSpec, folder: RunFolder) -> None:
        self.asked, self.spec, self.folder = asked, spec, folder
        self.notes = [note for note in (asked.note, asked.unshaped) if note]
        self.network = "network: one node, no link to measure" if spec.world == 1 else "network: not measured"
        self.invalid = asked.unshaped if spec.world > 1 else ""
        self._begun = threading.Lock()

    @contextmanager
    def once(self) -> Iterator[bool]:
        """True for the first thread that gets here; it alone may end the run."""
        yield self._begun.acquire(blocking=False)

    def measure(self, addresses: Sequence[str], port: int) -> bool:
        """Take part in the probe; False where a rate was asked and not got, twice."""
        if not self.spec.probe:
            self.notes.append("probe = false: nobody checked the network")
            return True
        rates = [self.spec.link_of(rank).rate for rank in range(self.spec.world)]
        probe = partial(self._probe, addresses, port, rates)
        receipt, notes = measure(probe, self._say, retry=not self.asked.unshaped)
        self.notes += notes
        self.network = receipt.sentence()
        if self.asked.rank == 0:
            receipt.write(self.folder.receipt)
        if self.asked.unshaped or receipt.valid():
            return True
        self.invalid = self.network
        return False

    def good(self) -> int:
        """The run went to its end; the table, or why this run is not in one."""
        summary = self._write("invalid" if self.invalid else "ok", self.invalid)
        _print(summary, self.folder)
        if summary.status == "failed":  # its records say so
            return RankFailed.exit_code
        return 0 if not self.invalid or self.asked.unshaped else NetworkInvalid.exit_code

    def bad(self, error: Error, store: dist.Store | None) -> None:
        """The run did not; what the others said counts where this rank only lost them."""
        first = _first_cause(error, self.spec, store)
        status: Literal["interrupted", "failed"] = "interrupted" if error.code == Interrupted.exit_code else "failed"
        self._write(status, first)
        print(
            f"{status}: {first}\neverything is in runs/{self.folder.path.parent.name}/{self.folder.path.name}",
            file=sys.stderr,
            flush=True,
        )

    def _probe(self, addresses: Sequence[str], port: int, rates: Sequence[int | None]) -> Receipt:
        rank = self.asked.rank
        try:
            return receipt_of(probe_node(rank, addresses, port, rates[rank], lambda event: None), rates)
        except (OSError, ProbeError) as error:
            raise NetworkInvalid(f"the probe of the network failed: {error}") from None

    def _write(self, status: Literal["ok", "invalid", "failed", "interrupted"], reason: str) -> Summary:
        facts: dict[str, Any] = {"status": status, "reason": reason, "substrate": self.asked.place}
        summary = summarise(self.folder, self.spec, notes=self.notes, network=self.network, **facts)
        write_whole(self.folder.summary, summary.model_dump_json(by_alias=True, indent=1))
        return summary

    def _say(self, text: str) -> None:
        if self.asked.rank == 0:
            print(text, flush=True)


def _first_cause(own: Error, spec: RunSpec, store: dist.Store | None) -> str:
    """Whoever ended for another reason than losing a peer; this rank, where nobody did."""
    if store is None or own.code != PeerLost.exit_code or own.failed_rank is not None:
        return own.message
    told = []
    for rank in range(1, spec.world):
        try:
            store.wait([f"failed/{rank}"], timedelta(seconds=HEARSAY))
            told.append((rank, json.loads(store.get(f"failed/{rank}"))))
        except RuntimeError:
            continue  # it is dead, or well
    causes = [f"rank {rank}: {error['message']}" for rank, error in told if error["code"] != PeerLost.exit_code]
    silent = sorted(set(range(1, spec.world)) - {rank for rank, _ in told})
    gone = f" (silent: {', '.join(f'rank {rank}' for rank in silent)})" if silent else ""
    return causes[0] if causes else own.message + gone


def _print(summary: Summary, folder: RunFolder) -> None:
    """The table, what it leaves out and why, and where everything is."""
    if summary.status == "ok":
        print(f"\n{caption([summary])}\n\n{format_table(*table([summary]))}\n")
    for line in left_out([summary]):
        seconds = f" ({summary.seconds_per_step:.3f} s/iter)" if summary.seconds_per_step else ""
        print(f"not in a table: {line}{seconds}")
    for note in summary.notes:
        print(f"note: {note}")
    print(f"everything is in runs/{folder.path.parent.name}/{folder.path.name}", flush=True)
