"""Deploy: the image and the data to every host that lacks them, in parallel; a host that fails stops no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from testbed.control.content import content_hash
from testbed.control.substrates.hosts_each import Outcome, each
from testbed.control.substrates.hosts_facts import SOON, account, engine, free_at, free_bytes, image_content
from testbed.control.substrates.hosts_parcel import Parcel, digests, pack_data, pack_image
from testbed.control.substrates.hosts_remote import Account
from testbed.control.substrates.hosts_ssh import CommandFailed, Host, HostFailed
from testbed.spec.datasets import DATASETS, data_dir, dataset_info, is_complete
from testbed.spec.errors import TestbedError, Unavailable

TRANSFER = 3600.0  # seconds for one host to take and unpack a parcel
ROOM = 1.3  # free bytes wanted per byte of the unpacked image: the engine unpacks before it renames


class Bars(Protocol):
    """What a person sees of the transfers."""

    def say(self, text: str) -> None: ...
    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]: ...
    def end(self, host: str, what: str) -> None: ...


@dataclass
class Delivery:
    """What one host got; `image` and `data` are one word each."""

    host: str
    image: str = ""
    data: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: TestbedError | None = None


class Packing:
    """Each parcel is packed when the first host needs it, once for all."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._lock = Lock()
        self._parcels: dict[str, Parcel] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def image(self) -> Parcel:
        return self._once("image", pack_image)

    def data(self, name: str) -> Parcel:
        return self._once(name, lambda: pack_data(name, self.digests(name)))

    def digests(self, name: str) -> dict[str, str]:
        if name not in self._digests:
            self._digests[name] = digests(name)
        return self._digests[name]

    def _once(self, what: str, pack: Callable[[], Parcel]) -> Parcel:
        with self._lock:
            if what not in self._parcels:
                self._bars.say(f"packing {what} (once for all hosts)")
                self._parcels[what] = pack()
            return self._parcels[what]


def deploy(outcomes: Sequence[Outcome[Host]], data: Sequence[str], bars: Bars) -> list[Delivery]:
    """To all hosts that answered; what went wrong is in each host's row."""
    check_data(data)
    packing = Packing(bars)
    rows = {outcome.host.name: Delivery(outcome.host.name, error=outcome.error) for outcome in outcomes}

    def deliver(host: Host) -> None:
        row, begun = rows[host.name], time.monotonic()
        try:
            row.image = _bring_image(host, packing, bars)
            for name in data:
                row.data[name] = _bring_data(host, name, packing, bars)
        except TestbedError as error:
            row.error = error
        row.seconds = time.monotonic() - begun

    for outcome in each([outcome.host for outcome in outcomes if outcome.error is None], deliver):
        rows[outcome.host.name].error = rows[outcome.host.name].error or outcome.error
    return list(rows.values())


def check_data(names: Sequence[str]) -> None:
    """What is to be sent must be here."""
    for name in names:
        dataset_info(name)
        if not is_complete(name, data_dir()):
            fix = f"Get it with `testbed data get {name}`, or use --data synthetic."
            raise Unavailable(f"data {name!r}: not in {(data_dir() / name).resolve()}. {fix}")


def sendable(name: str) -> list[str]:
    """A data set's name as a list of what must travel for it."""
    return [] if name in DATASETS and dataset_info(name).generated else [name]


def _bring_image(host: Host, packing: Packing, bars: Bars) -> str:
    engine(host)
    wanted = content_hash()
    if image_content(host) == wanted:
        return "there already"
    parcel = packing.image()
    _check_room(host, free_bytes(host), round(parcel.unpacked * ROOM), "the image")
    _send(host, "image", parcel, ["docker", "load", "--quiet"], bars)
    if image_content(host) != wanted:
        raise HostFailed(f"{host}: the image came through, but the engine does not show it. Run fab deploy again")
    _forget_older(host)
    return "sent"


def _forget_older(host: Host) -> None:
    """What the new image replaced, and only ours; one that is in use stays."""
    host.run(["docker", "image", "prune", "--force", "--filter", "label=testbed.content"], SOON)


def _check_room(host: Host, free: int, needed: int, what: str) -> None:
    if free < needed:
        room = f"{free / 1e9:.1f} GB are free, {what} needs {needed / 1e9:.1f}"
        raise HostFailed(f"{host}: disk full: {room}. Make room there, e.g. docker system prune")


def _send(host: Host, what: str, parcel: Parcel, argv: Sequence[str], bars: Bars) -> None:
    advance = bars.begin(host.name, what, parcel.path.stat().st_size)
    try:
        with parcel.path.open("rb") as source:
            host.send(argv, source, TRANSFER, advance)
    except CommandFailed as error:
        full = "no space left" in error.said.lower()
        fix = "disk full. Make room there, e.g. docker system prune" if full else f"{error.said[:200]}. Run it again"
        raise HostFailed(f"{host}: {what} was not taken: {fix}") from None
    finally:
        bars.end(host.name, what)


def _bring_data(host: Host, name: str, packing: Packing, bars: Bars) -> str:
    """Into a folder beside, verified there, then renamed: a data set is there whole or not at all."""
    who = account(host)
    target, staged = who.data / name, who.data / f".{name}.partial"
    wanted = packing.digests(name)
    if _digests_there(host, who, name, wanted) == wanted:
        return "there already"
    parcel = packing.data(name)
    host.run(["rm", "-rf", str(staged)], SOON)
    host.run(["mkdir", "-p", str(staged)], SOON)
    _check_room(host, free_at(host, str(staged)), round(parcel.unpacked * ROOM), name)
    _send(host, name, parcel, ["tar", "-xzf", "-", "-C", str(staged)], bars)
    if _digests_there(host, who, f".{name}.partial", wanted) != wanted:
        host.run(["rm", "-rf", str(staged)], SOON)
        raise HostFailed(f"{host}: data {name} came with wrong checksums and was thrown away. Run fab deploy again")
    host.run(["rm", "-rf", str(target)], SOON)
    host.run(["mv", str(staged), str(target)], SOON)
    return "sent"


def _digests_there(host: Host, who: Account, name: str, wanted: dict[str, str]) -> dict[str, str]:
    """SHA-256 of the files on the host, by name; files that are missing are left out."""
    paths = [str(who.data / name / each) for each in sorted(wanted)]
    try:
        text = host.run(["sha256sum", "--", *paths], TRANSFER)
    except CommandFailed:
        return {}
    pairs = [line.split(maxsplit=1) for line in text.splitlines()]
    return {path.rpartition("/")[2]: digest for digest, path in pairs}
