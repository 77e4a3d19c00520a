"""Doctor for hosts: one row each, asked in parallel; what is wrong is one line with its fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from testbed.control.substrates.base import NODE_PORT
from testbed.control.substrates.content import content_hash
from testbed.control.substrates.hosts.group import Outcome, each
from testbed.control.substrates.hosts.node import (
    Endpoint,
    account,
    check_apart,
    content_on_host,
    endpoint,
    engine,
    first_endpoint,
    free_bytes,
    try_meeting,
)
from testbed.control.substrates.hosts.ssh import Host
from testbed.spec.errors import AuthenticationFailed, KeyUnknown, TestbedError

HEADER = ("host", "reachable", "key", "engine", "free disk", "clock offset", "interface", "ports", "image")
LITTLE = 3e9  # bytes; the image unpacked, with room for a run
CLOCK = 1.0  # seconds; more makes logs of several hosts hard to read side by side


@dataclass
class Row:
    """What one host said; `troubles` are sentences with a fix."""

    host: Host
    cells: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    end: Endpoint | None = None
    image: str | None = None

    def line(self) -> tuple[str, ...]:
        return (self.host.name, *(self.cells.get(column, "-") for column in HEADER[1:]))

    def ask(self, column: str, question: Callable[[], str]) -> None:
        """Fill a cell; a failure is a trouble, and the other questions are asked all the same."""
        try:
            self.cells[column] = question()
        except TestbedError as error:
            self.cells[column] = "no"
            self.troubles.append(str(error))


def examine(outcomes: Sequence[Outcome[Host]]) -> list[Row]:
    """All rows, in rank order."""
    rows = [_first(outcome) for outcome in outcomes]
    there = [row for row in rows if row.cells["reachable"] == "yes"]
    by_host = {row.host.name: row for row in there}
    each([row.host for row in there], lambda host: _look(by_host[host.name]))
    master = _master(rows)
    each([row.host for row in there], lambda host: _route(by_host[host.name], master))
    _meet([row for row in rows if row.end is not None and row.image is not None], rows)
    return rows


def _first(outcome: Outcome[Host]) -> Row:
    """Whether it answers, and whether its key is the known one."""
    row, error = Row(outcome.host), outcome.error
    if error is not None:
        row.troubles.append(str(error))
    answers = error is None or isinstance(error, KeyUnknown | AuthenticationFailed)
    row.cells["reachable"] = "yes" if error is None else "not let in" if answers else "no"
    row.cells["key"] = "refused" if isinstance(error, KeyUnknown) else "known" if answers else "-"
    return row


def _look(row: Row) -> None:
    host = row.host

    def disk() -> str:
        free = free_bytes(host)
        if free < LITTLE and row.image != content_hash():
            row.troubles.append(f"{host}: disk full: {free / 1e9:.1f} GB free. Make room there: docker system prune")
        return f"{free / 1e9:.1f} GB"

    def clock() -> str:
        found = host.clock()
        if abs(found.offset) - found.error > CLOCK:
            row.troubles.append(
                f"{host}: its clock is {found.offset:+.1f} s off ours. Set it there, e.g. timedatectl set-ntp 1"
            )
        return f"{1000 * found.offset:+.0f} ms (±{1000 * found.error:.0f})"

    row.ask("engine", lambda: engine(host))
    row.ask("clock offset", clock)
    if row.cells["engine"] != "no":
        row.ask("image", lambda: _image(row))
        row.ask("free disk", disk)


def _image(row: Row) -> str:
    account(row.host)  # the home folder is there, too
    row.image = content_on_host(row.host)
    if row.image is None:
        return "none (fab deploy)"
    return row.image if row.image == content_hash() else f"{row.image}, old (fab deploy)"


def _master(rows: Sequence[Row]) -> str:
    """Rank 0's address; where it cannot be asked, what the inventory says of it."""
    first = rows[0]
    if first.cells["reachable"] == "yes":
        try:
            second = rows[1].host.node.address if len(rows) > 1 else None
            first.end = first_endpoint(first.host, second)
            first.cells["interface"] = f"{first.end.interface} {first.end.address}"
            return first.end.address
        except TestbedError as error:
            first.cells["interface"] = "no"
            first.troubles.append(str(error))
    return first.host.node.address


def _route(row: Row, master: str) -> None:
    def interface() -> str:
        row.end = endpoint(row.host, master)
        return f"{row.end.interface} {row.end.address}"

    if "interface" not in row.cells:
        row.ask("interface", interface)


def _meet(able: Sequence[Row], rows: Sequence[Row]) -> None:
    """Ports between all pairs, by a program of the image: hosts without it are told so."""
    for row in rows:
        if row.cells["reachable"] == "yes" and row not in able:
            row.cells["ports"] = "after deploy"
    if len(able) < 2:
        for row in able:
            row.cells["ports"] = "nobody to meet"
        return
    ends = [row.end for row in able if row.end is not None]
    try:
        check_apart([row.host for row in able], ends)
    except TestbedError as error:
        able[0].troubles.append(str(error))
        return
    for row, outcome in zip(able, try_meeting([row.host for row in able], ends, NODE_PORT), strict=True):
        _judge(row, outcome, able)


def _judge(row: Row, outcome: Outcome, able: Sequence[Row]) -> None:  # type: ignore[type-arg]
    answer = outcome.value
    if answer is None:
        row.cells["ports"] = "no"
        row.troubles.append(str(outcome.error))
    elif answer.busy:
        row.cells["ports"] = f"{NODE_PORT} taken"  # a run takes another
    elif answer.missing:
        names = ", ".join(able[other].host.name for other in answer.missing)
        row.cells["ports"] = f"not with {names}"
        row.troubles.append(
            f"{row.host}: no connection to and from {names} at port {NODE_PORT}. Is there a firewall between them?"
        )
    else:
        row.cells["ports"] = f"free, {len(able) - 1} reached"
