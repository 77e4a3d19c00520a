"""Replace a script's hard-coded master address and interface by those of the node, where the node has others.

In namespaces node 0 has the address that is in the script (`--address`), so nothing is rewritten there. The observer
calls `install`, which replaces `rendezvous`, the function by which init_process_group finds the other ranks.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from testbed.attach.events import note_once

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def request(address: str, interface: str, master: str, own_interface: str) -> dict[str, list[str]]:
    """Return what to rewrite: {"address": [in the script, on the node], "interface": [...]}, without equal pairs."""
    pairs = {"address": [address, master], "interface": [interface, own_interface]}
    return {key: pair for key, pair in pairs.items() if pair[0] and pair[0] != pair[1]}


def install(wanted: dict[str, list[str]], changed: list[str]) -> None:
    """Rewrite at every init_process_group. Append one sentence to `changed` for each change."""
    if not wanted:
        return
    from torch.distributed import distributed_c10d

    original = distributed_c10d.rendezvous

    @functools.wraps(original)
    def rendezvous(url: str, *arguments: Any, **named: Any) -> Any:
        rewrite_variables(wanted, os.environ, changed)
        return original(rewrite_url(wanted, url, changed), *arguments, **named)

    distributed_c10d.rendezvous = rendezvous


def rewrite_url(wanted: dict[str, list[str]], url: str, changed: list[str]) -> str:
    """Return the URL with the address of node 0. Return other URLs unchanged."""
    there, here = wanted.get("address", ["", ""])
    if not there or f"//{there}:" not in url:
        return url
    found = url.replace(f"//{there}:", f"//{here}:")
    note_once(changed, f"init_process_group used {found} instead of {url}: no node has the address {there} here")
    return found


def rewrite_variables(wanted: dict[str, list[str]], variables: Any, changed: list[str]) -> None:
    """Rewrite MASTER_ADDR and the interface variables where they have the script's hard-coded values."""
    for key, names in (("address", ("MASTER_ADDR",)), ("interface", INTERFACE_VARIABLES)):
        there, here = wanted.get(key, ["", ""])
        for name in names:
            if there and variables.get(name) == there:
                variables[name] = here
                note_once(changed, f"{name} was {here} instead of {there}: no node has this {key} here")
