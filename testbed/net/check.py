"""Check that the network of a run is the requested one: probe before training, compare and probe again after it.

The controller checks all nodes at once. A rank without a controller checks its own node, and all ranks agree on the
result. The caller passes in how to read the shaping of a node (net/shaping.py) and how to probe (net/probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.net.probe import link_steps_of, uplink_steps
from testbed.net.shaping import Shaping, difference
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.results.records import read
from testbed.results.validity import counted
from testbed.spec.errors import EngineLost, Interrupted, TestbedError
from testbed.spec.run import RunSpec
from testbed.spec.words import setting

Probe = Callable[[], Receipt]
Announce = Callable[[str], None]  # shows the user a sentence about the progress


@dataclass(frozen=True)
class NetworkCheck:
    """The result of `measure`."""

    network: str  # one line, for summary.json
    receipt: Receipt | None = None  # None: nothing was measured
    notes: Sequence[str] = ()

    @property
    def invalid(self) -> bool:
        """True if a requested rate was not measured within the tolerance."""
        return self.receipt is not None and not self.receipt.valid()


def measure(
    spec: RunSpec, probe: Probe, announce: Announce, retry: bool = True, earlier: Receipt | None = None
) -> NetworkCheck:
    """Probe the network of a run, and once more if the receipt is invalid, because a busy machine can spoil one probe.

    The better result of each link counts. All nodes of a probe get the same receipt, so all of them make the same
    decision. Raise NetworkInvalid if the probe could not finish. `earlier`: a receipt of the same nodes, which is used
    instead of a probe.
    """
    if spec.world == 1:
        return NetworkCheck("one node, no network")
    if not spec.probe:
        return NetworkCheck("not measured (probe = false)", notes=["probe = false: the network was not checked"])
    if earlier is not None:
        announce(earlier.sentence())
        return NetworkCheck(earlier.sentence(), earlier)
    links, between = sum(map(len, link_steps_of(spec.fabric))), spec.world * (spec.world - 1)
    rest = "the fan-ins and the uplinks" if uplink_steps(spec.fabric) else "the fan-ins"
    announce(f"measuring the network: {links}{f' of {between}' if links < between else ''} links, {rest}")
    receipt, notes = probe(), []
    if retry and not receipt.valid():
        notes.append(f"first probe: {receipt.sentence()}")
        announce(f"{receipt.sentence()}; measuring once more")
        receipt = receipt.better(probe())
    announce(receipt.sentence())
    return NetworkCheck(receipt.sentence(), receipt, notes)


def why_not_trained(spec: RunSpec, invalid: str) -> str:
    """Return the message if a run ends before training because its network is `invalid`; empty if the run trains."""
    if not invalid or spec.keep_going:
        return ""
    way_out = f"try again on an idle machine, or use {setting('keep_going', True)} to train on this network"
    return f"{invalid}. Nothing was trained: {way_out}"


@dataclass(frozen=True)
class Rechecked:
    """The result of `Recheck.after`."""

    invalid: str = ""  # why the network was not the requested one during training; empty if it was
    notes: Sequence[str] = ()


class Recheck:
    """Compares the shaping of nodes with the request before and after training, and then probes some links again.

    `read_shaping` returns the shaping of the nodes to compare, by rank. It returns none if nothing is shaped, or if
    there is one node only, which sends nothing.
    """

    def __init__(
        self,
        folder: RunFolder,
        read_shaping: Callable[[], Mapping[int, Shaping]],
        interface: str = "eth0",
        read_uplinks: Callable[[], Mapping[int, Shaping]] = dict,
    ) -> None:
        self._folder, self._read, self._interface, self._read_uplinks = folder, read_shaping, interface, read_uplinks
        self._before, self._uplinks_before = read_shaping(), read_uplinks()

    @property
    def shaped(self) -> bool:
        """True if a rate was requested of one of the nodes."""
        every = (*self._before.values(), *self._uplinks_before.values())
        return any(shaping.rate is not None for shaping in every)

    def before(self) -> str:
        """Return what is wrong before training with the first link not shaped as requested; empty if all are."""
        nodes = (difference(_name(rank), Shaping(), now, iface=self._interface) for rank, now in self._before.items())
        return _first(
            [*nodes, *(_uplink_difference(rack, Shaping(), now) for rack, now in self._uplinks_before.items())]
        )

    def after(
        self,
        probe: Probe | None,
        announce: Announce,
        receipt: bool = True,
        agree: Callable[[str, str], str] = lambda key, reason: reason,
    ) -> Rechecked:
        """Compare again, then probe a sample of the links. `probe` None: probe nothing.

        If all buckets and their counters are right, only a link that is too fast shows that shaping was lost. A probe
        that fails, or a link that is too slow, may come from a busy machine, so it is a note only. `receipt` False:
        another node adds the sample to receipt.json. `agree` returns the same reason on all nodes.
        """
        reason = agree("shaping", self._changed())
        if reason or probe is None:
            return Rechecked(f"after training: {reason}" if reason else "")
        found, note = _sample(probe, announce)
        if found is not None and receipt:
            Receipt.read(self._folder.receipt).model_copy(update={"after": found}).write(self._folder.receipt)
        reason = agree("sample", found.sentence(fastest=True) if found and found.too_fast() else "")
        return Rechecked(f"after training: {reason}" if reason else "", [note] if note else [])

    def _changed(self) -> str:
        try:
            now, uplinks = self._read(), self._read_uplinks()
            sizes = {rank: counted(read(self._folder.records(rank))) for rank in now if now[rank].rate is not None}
        except (EngineLost, Interrupted):
            raise
        except TestbedError as error:
            return f"the network could not be checked: {error}"
        nodes = (
            difference(_name(rank), self._before[rank], now[rank], size, self._interface)
            for rank, size in sizes.items()
        )
        return _first(
            [*nodes, *(_uplink_difference(rack, self._uplinks_before[rack], each) for rack, each in uplinks.items())]
        )


def _uplink_difference(rack: int, before: Shaping, now: Shaping) -> str:
    """Return why the uplink of a rack is not as requested, or has passed less than its devices sent; empty if it is."""
    up, down = f"up{rack}", f"down{rack}"
    sent = [now.sent.get(device, 0) - before.sent.get(device, 0) if before.sent else 0 for device in (up, down)]
    return difference(f"uplink of rack {rack}", before, now, (sent[0], sent[1]), up, down)


def _first(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _name(rank: int) -> str:
    return f"node{rank}"


def _sample(probe: Probe, announce: Announce) -> tuple[Receipt | None, str]:
    """Probe, and once more if the probe fails or a link is off. Return the better result of each link, and a note."""
    first, problem = _try(probe)
    if not problem:
        return first, ""
    announce(f"after training: {problem}; measuring once more")
    second, problem = _try(probe)
    found = first.better(second) if first and second else second or first
    if found is not None and found.valid():
        return found, ""
    return found, f"after training: {problem if found is None else found.sentence()}"


def _try(probe: Probe) -> tuple[Receipt | None, str]:
    """Return the receipt, or None if the probe failed, and what is wrong; "" if nothing is wrong."""
    try:
        receipt = probe()
    except (EngineLost, Interrupted):
        raise
    except TestbedError as error:
        return None, str(error)
    return receipt, "" if receipt.valid() else receipt.sentence()
