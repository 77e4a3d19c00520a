"""Build the `ip` commands that remove the routes out of a container's network. This module runs no command.

The entrypoint of a container and the compose substrate run them before a rank starts. A rank has no capability, so it
cannot undo them. Other ranks are on the same subnet and are reached by address; names are resolved before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Docker's name server, which every container has. It forwards unknown names to servers outside the network.
RESOLVER = "127.0.0.11"


def default_routes() -> list[str]:
    """Return the command that prints the default routes as JSON."""
    return ["ip", "-json", "-4", "route", "show", "default"]


def isolate(defaults: Iterable[dict[str, Any]], gateways: Iterable[str] = ()) -> list[list[str]]:
    """Return the commands that remove the default routes and make gateways and the name server unreachable.

    `gateways`: further addresses of the subnet that belong to no rank. A gateway is an address of the host itself. Its
    route is `throw`, so that the kernel counts an attempt to reach it as one without a route, as with any address
    outside. Programs ask the name server also for names inside, so such attempts must not be counted: its route is
    `blackhole`.
    """
    routes = list(defaults)
    found = [str(route["gateway"]) for route in routes if "gateway" in route]
    hosts = dict.fromkeys([*found, *gateways])
    return [
        *(["ip", "route", "del", "default", *_via(route)] for route in routes),
        *(["ip", "route", "replace", "throw", f"{host}/32"] for host in hosts),
        ["ip", "route", "replace", "blackhole", f"{RESOLVER}/32", "table", "local"],
    ]


def _via(route: dict[str, Any]) -> list[str]:
    keys = (("via", "gateway"), ("dev", "dev"))
    return [word for option, key in keys if key in route for word in (option, str(route[key]))]
