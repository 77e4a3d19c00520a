"""`fab doctor`: check all hosts in parallel. There is one row per host, and one line with the fix per problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from testbed.control.substrates.clone import content_hash
from testbed.control.substrates.hosts.node import (
    Endpoint,
    Reachability,
    account,
    check_distinct,
    endpoint,
    engine_version,
    first_endpoint,
    free_engine_bytes,
    image_content,
    try_reachability,
)
from testbed.control.substrates.hosts.ssh import Host, Outcome, run_on_all
from testbed.spec.errors import AuthenticationFailed, KeyUnknown, TestbedError
from testbed.spec.run import DEFAULT_PORT

HEADER = ("host", "reachable", "key", "engine", "free disk", "clock offset", "interface", "ports", "image")
MIN_FREE_BYTES = 3e9  # for the unpacked image and a run
MAX_CLOCK_OFFSET_S = 1.0  # with a larger offset, logs of several hosts are hard to compare


@dataclass
class Row:
    """One host's cells, and its problems as sentences with a fix."""

    host: Host
    cells: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    end: Endpoint | None = None
    image: str | None = None

    def line(self) -> tuple[str, ...]:
        return (self.host.name, *(self.cells.get(column, "-") for column in HEADER[1:]))

    def fill(self, column: str, check: Callable[[], str]) -> None:
        """Set a cell to the result of `check`. If that raises TestbedError, set it to "no" and add the problem."""
        try:
            self.cells[column] = check()
        except TestbedError as error:
            self.cells[column] = "no"
            self.problems.append(str(error))


def examine(outcomes: Sequence[Outcome[Host]]) -> list[Row]:
    """Check all hosts and return their rows in rank order."""
    rows = [connection_row(outcome) for outcome in outcomes]
    by_host = {row.host: row for row in rows if row.cells["reachable"] == "yes"}
    run_on_all(list(by_host), lambda host: _check_host(by_host[host]))
    master = _check_master(rows)
    run_on_all(list(by_host), lambda host: _check_route(by_host[host], master))
    _check_ports(rows)
    return rows


def connection_row(outcome: Outcome[Host]) -> Row:
    """Return a row with the columns `reachable` and `key`."""
    row, error = Row(outcome.host), outcome.error
    if error is not None:
        row.problems.append(str(error))
    answers = error is None or isinstance(error, KeyUnknown | AuthenticationFailed)
    row.cells["reachable"] = "yes" if error is None else "not accepted" if answers else "no"
    row.cells["key"] = "refused" if isinstance(error, KeyUnknown) else "known" if answers else "-"
    return row


def _check_host(row: Row) -> None:
    row.fill("engine", lambda: engine_version(row.host))
    row.fill("clock offset", lambda: _clock(row))
    if row.cells["engine"] != "no":
        row.fill("image", lambda: _image(row))
        row.fill("free disk", lambda: _disk(row))


def _clock(row: Row) -> str:
    found = row.host.clock()
    if abs(found.offset) - found.error > MAX_CLOCK_OFFSET_S:
        problem = f"{row.host}: its clock differs from this machine's by {found.offset:+.1f} s"
        row.problems.append(f"{problem}. Set it there, e.g. timedatectl set-ntp 1")
    return f"{1000 * found.offset:+.0f} ms (±{1000 * found.error:.0f})"


def _image(row: Row) -> str:
    account(row.host)  # raises an error if the home folder is missing
    row.image = image_content(row.host)
    if row.image is None:
        return "none (fab deploy)"
    return row.image if row.image == content_hash() else f"{row.image}, old (fab deploy)"


def _disk(row: Row) -> str:
    free = free_engine_bytes(row.host)
    if free < MIN_FREE_BYTES and row.image != content_hash():
        row.problems.append(f"{row.host}: disk full: {free / 1e9:.1f} GB free. Make room there: docker system prune")
    return f"{free / 1e9:.1f} GB"


def _check_master(rows: Sequence[Row]) -> str:
    """Fill the cell of rank 0's interface and return rank 0's address; if that fails, the one in the inventory."""
    first = rows[0]
    if first.cells["reachable"] == "yes":
        first.fill("interface", lambda: _interface(first, lambda: first_endpoint(first.host, _second_address(rows))))
        if first.end is not None:
            return first.end.address
    return first.host.node.address


def _second_address(rows: Sequence[Row]) -> str | None:
    return rows[1].host.node.address if len(rows) > 1 else None


def _check_route(row: Row, master: str) -> None:
    if "interface" not in row.cells:
        row.fill("interface", lambda: _interface(row, lambda: endpoint(row.host, master)))


def _interface(row: Row, find: Callable[[], Endpoint]) -> str:
    row.end = find()
    return f"{row.end.interface} {row.end.address}"


def _check_ports(rows: Sequence[Row]) -> None:
    """Test ports between all pairs of hosts with a program of the image. A host without it gets "after deploy"."""
    able = [row for row in rows if row.end is not None and row.image is not None]
    for row in rows:
        if row.cells["reachable"] == "yes" and row not in able:
            row.cells["ports"] = "after deploy"
    if len(able) < 2:
        for row in able:
            row.cells["ports"] = "no other host"
        return
    hosts, ends = [row.host for row in able], [row.end for row in able if row.end is not None]
    try:
        check_distinct(hosts, ends)
    except TestbedError as error:
        able[0].problems.append(str(error))
        return
    for row, outcome in zip(able, try_reachability(hosts, ends, DEFAULT_PORT), strict=True):
        _fill_ports(row, outcome, able)


def _fill_ports(row: Row, outcome: Outcome[Reachability], able: Sequence[Row]) -> None:
    answer = outcome.value
    if answer is None:
        row.cells["ports"] = "no"
        row.problems.append(str(outcome.error))
    elif answer.busy:
        row.cells["ports"] = f"{DEFAULT_PORT} taken"  # not a problem: a run uses another port
    elif answer.missing:
        names = ", ".join(able[other].host.name for other in answer.missing)
        row.cells["ports"] = f"not with {names}"
        problem = f"{row.host}: no connection to and from {names} at port {DEFAULT_PORT}"
        row.problems.append(f"{problem}. Check firewalls between them")
    else:
        row.cells["ports"] = f"free, {len(able) - 1} reached"
