"""A Docker engine that only answers: the engine's HTTP API on a socket, so that the real SDK is what a test runs."""

from __future__ import annotations

import json
import re
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

MEMORY_BYTES = 1_000_000_000  # of the engine's machine
Answer = tuple[int, Any]


class ScriptedEngine:
    """Containers and networks by id, and what was requested; `broken` refuses to unpause."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.networks: dict[str, dict[str, str]] = {}  # labels
        self.image: dict[str, str] | None = None  # labels
        self.updates: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.broken = False

    def add_container(self, name: str, labels: dict[str, str], state: str = "running") -> None:
        limits = {"Memory": 0, "MemorySwap": 0}
        self.containers[name] = {"Id": name, "Labels": labels, "State": state, "HostConfig": limits}

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        """Return the status and the JSON of one request; `path` is without the API's version."""
        labels = json.loads(query.get("filters", ["{}"])[0]).get("label", [])
        match [method, *path.strip("/").split("/")]:
            case ["GET", "version"]:
                return 200, {"Version": "28.0", "ApiVersion": "1.44"}
            case ["GET", "info"]:
                return 200, {"NCPU": 4, "MemTotal": MEMORY_BYTES}
            case ["GET", "images", "json"]:
                return 200, []
            case ["GET", "images", *_]:
                if self.image is None:
                    return 404, {"message": "No such image"}
                return 200, {"Id": "i", "Size": 7, "Config": {"Labels": self.image}}
            case ["GET", "networks"]:
                found = {key: own for key, own in self.networks.items() if _has(own, labels)}
                return 200, [{"Id": key, "Labels": own} for key, own in found.items()]
            case ["DELETE", "networks", key]:
                return (204, None) if self.networks.pop(key, None) else (404, {"message": f"no network {key}"})
            case ["GET", "containers", "json"]:
                return 200, [each for each in self.containers.values() if _has(each["Labels"], labels)]
            case [_, "containers", key, *action]:
                return self._container(method, key, action, body)
        return 500, {"message": f"not scripted: {method} {path}"}

    def _container(self, method: str, key: str, action: list[str], body: Any) -> Answer:
        if key not in self.containers:
            return 404, {"message": f"No such container: {key}"}
        found = self.containers[key]
        match action:
            case ["json"]:
                return 200, found
            case ["stats"]:
                return 200, {"memory_stats": {"usage": 130 << 20, "stats": {"total_inactive_file": 30 << 20}}}
            case ["update"]:
                self.updates.append(body)
                return 200, {"Warnings": None}
            case [("pause" | "unpause") as verb]:
                before, after = ("running", "paused") if verb == "pause" else ("paused", "running")
                if found["State"] != before or (verb == "unpause" and self.broken):
                    return 409, {"message": f"Container {key} is not {before}"}
                found["State"] = after
                return 204, None
            case [] if method == "DELETE":
                del self.containers[key]
                self.removed.append(key)
                return 204, None
        return 500, {"message": f"not scripted: {action}"}


def _has(own: dict[str, str], labels: list[str]) -> bool:
    parts = (label.partition("=") for label in labels)
    return all(key in own and (not equals or own[key] == value) for key, equals, value in parts)


@contextmanager
def serve(engine: ScriptedEngine, path: Path) -> Iterator[str]:
    """Listen on a socket; the value for DOCKER_HOST."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            url = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status, found = engine.answer(self.command, re.sub(r"^/v[\d.]+", "", url.path), parse_qs(url.query), body)
            content = b"" if found is None else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """A test prints nothing."""

    class Server(socketserver.ThreadingUnixStreamServer):
        def handle_error(self, *request: object) -> None:
            """Print nothing if the client has closed its connection early; else the traceback."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(*request)

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            server.shutdown()
            thread.join()
