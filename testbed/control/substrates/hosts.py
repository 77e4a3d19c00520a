"""Real hosts: one rank each, in a container of the same image, on the network that is there.

The network is measured and never shaped; no interface is touched. Containers get the host's network and no privilege.
Leave it and every container and file of this run is gone from the hosts, with one exception: when a connection broke,
what runs goes on there, and `fab collect` finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Self

from testbed.control.content import content_hash
from testbed.control.substrates.base import MEMORY_LEFT, NODE_PORT, NodeHandle, NodePlan, Process
from testbed.control.substrates.hosts_each import connected, each, values
from testbed.control.substrates.hosts_facts import SOON, account, engine, image_content, remove_containers
from testbed.control.substrates.hosts_meeting import endpoints, meeting_port
from testbed.control.substrates.hosts_process import Mirror, RemoteProcess, Together, version_of, when_back
from testbed.control.substrates.hosts_remote import (
    HOME,
    RUN_LABEL,
    STOP_GRACE,
    UNTOUCHED,
    Account,
    Container,
    mount,
    once,
    run_id,
)
from testbed.control.substrates.hosts_ssh import CommandFailed, ConnectionLost, Host, HostFailed
from testbed.spec.datasets import MARKER, data_dir, dataset_info
from testbed.spec.errors import TestbedError, Unavailable
from testbed.spec.folder import RunFolder, write_whole
from testbed.spec.inventory import Inventory
from testbed.spec.mode import ALGORITHMS, methods_dir
from testbed.spec.run import RunSpec
from testbed.spec.units import parse_size

NOTE = "hosts.json"  # in the run's folder: what `fab collect` needs to find the run again


class HostsSubstrate:
    """The hosts of an inventory, in rank order."""

    name = "hosts"
    shaped = False
    one_clock = False
    python = "python3"  # of the image

    def __init__(
        self,
        plans: Sequence[NodePlan],
        folder: Path,
        spec: RunSpec,
        inventory: Inventory,
        *,
        accept_new: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        self._plans = tuple(plans)
        self._folder = folder.resolve()
        self._spec = spec
        self._inventory = inventory.first(len(plans))
        self._accept_new = accept_new
        self.notes = notes
        self._id = run_id(folder)
        self._cleanup = ExitStack()
        self._hosts: list[Host] = []
        self._accounts: list[Account] = []
        self._started: list[RemoteProcess] = []
        self._out_of_reach: set[Host] = set()  # when the run was to be stopped
        self._count = itertools.count()
        self._port = NODE_PORT
        self.nodes: Sequence[NodeHandle] = ()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._hosts = values(undo.enter_context(connected(self._inventory.nodes, self._accept_new)))
            self._accounts = values(each(self._hosts, self._check))
            ends = endpoints(self._hosts)
            self._port = meeting_port(self._hosts, ends, self._spec.port)
            self.nodes = tuple(
                NodeHandle(name=host.name, address=end.address, interface=end.interface)
                for host, end in zip(self._hosts, ends, strict=True)
            )
            undo.callback(self._remove)
            values(each(self._hosts, lambda host: host.run(["mkdir", "-p", str(self._place(host))], SOON)))
            undo.callback(self.stop)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _check(self, host: Host) -> Account:
        """Engine, image and data are there."""
        engine(host)
        found, wanted = image_content(host), content_hash()
        if found != wanted:
            what = "the image is missing" if found is None else f"the image has content {found}, the code here {wanted}"
            raise HostFailed(f"{host}: {what}. Send it: fab deploy")
        who, name = account(host), self._spec.data.name
        if not dataset_info(name).generated:
            try:
                there = host.run(["cat", str(who.data / name / MARKER)], SOON)
            except CommandFailed:
                there = ""
            if there.strip() != (data_dir() / name / MARKER).read_text().strip():
                raise HostFailed(f"{host}: data {name} is not there. Send it: fab deploy --data {name}")
        return who

    def _place(self, host: Host) -> PurePosixPath:
        """This run's folder on a host."""
        return self._accounts[self._hosts.index(host)].runs / self._id

    def _remove(self) -> None:
        """Containers and files of this run; a run that goes on keeps them, and so does a host out of reach."""
        if self._goes_on():
            return
        there = [host for host in self._hosts if host not in self._out_of_reach]
        for outcome in each(there, lambda host: remove_run(host, self._id, self._place(host))):
            if outcome.error is not None:
                print(f"{outcome.error}. `fab clean` removes what was left there", file=sys.stderr, flush=True)

    def _goes_on(self) -> bool:
        """A connection broke for good while nobody wanted the run to end: it is left alone, on all hosts."""
        lost = (process for process in self._started if isinstance(process.error, ConnectionLost))
        return any(process.host not in self._out_of_reach for process in lost)

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end in a container of its own."""
        return self._hosts[node].run(once(self._accounts[node].who, argv[0], *argv[1:]), timeout)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a container and return at once; its log and its records are copied home as they grow."""
        host, number = self._hosts[node], next(self._count)
        place, is_rank = self._place(host), log.parent.resolve() == self._folder
        output = log.name if is_rank else f"probe{number}.log"
        container = Container(
            name=f"testbed-{self._id}-{number}",
            run=self._id,
            rank=node,
            who=self._accounts[node].who,
            argv=argv,
            output=self._folder / output,
            mounts=self._mounts(node, place),
            env=env,
            cpus=self._plans[node].cpus if quota else None,
            purpose="rank" if is_rank else "probe",
        )
        mirrors = [Mirror(place / output, log), *([self._records(node)] if is_rank else [])]
        self._started.append(process := RemoteProcess(host, container, mirrors))
        return Together(process, self._started)

    def _records(self, node: int) -> Mirror:
        """From the first byte: what an earlier attempt recorded is set aside, here now and there by its rank."""
        folder = RunFolder(self._folder)
        there = self._place(self._hosts[node]) / folder.records(node).name
        earlier = folder.set_records_aside(node)
        return Mirror(there, folder.records(node), old=version_of(self._hosts[node], there) if earlier else None)

    def _mounts(self, node: int, place: PurePosixPath) -> list[list[str]]:
        """Under the paths they have here, so that a path means the same there."""
        mounts = [mount(place, self._folder)]
        if not dataset_info(self._spec.data.name).generated:
            mounts.append(mount(self._accounts[node].data, data_dir().resolve(), read_only=True))
        if self._spec.mode.algorithm not in ALGORITHMS:
            mounts.append(mount(place / "methods", methods_dir().resolve(), read_only=True))
        return mounts

    def port(self, wanted: int = 0) -> int:
        """The one at which all hosts could reach each other."""
        return self._port

    def share(self, folder: Path) -> None:
        """Send what a rank is told: spec.json, and the user's own method."""
        write_note(folder, self._id, self._hosts)
        values(each(self._hosts, self._tell))

    def _tell(self, host: Host) -> None:
        node, place = self._hosts.index(host), self._place(host)
        self.put(node, RunFolder(self._folder).spec, Path(place / "spec.json"))
        if self._spec.mode.algorithm not in ALGORITHMS:
            host.run(["mkdir", "-p", str(place / "methods")], SOON)
            name = f"{self._spec.mode.algorithm.replace('-', '_')}.py"
            self.put(node, methods_dir() / name, Path(place / "methods" / name))
        if self._accounts[node].uid == 0:  # where we are root, the rank is nobody
            host.run(["chown", "-R", self._accounts[node].who, str(place)], SOON)

    def stop(self) -> None:
        """SIGTERM, some seconds to write things down, then SIGKILL. After a lost connection ranks go on instead.

        A host that cannot be reached stops no other from being stopped; it is named in the end.
        """
        running = [p for p in self._started if not p.ended and p.host not in self._out_of_reach]
        if self._goes_on() or not running:
            return

        def end(host: Host) -> None:
            names = [process.name for process in running if process.host is host]
            with contextlib.suppress(CommandFailed):  # it has ended meanwhile
                when_back(lambda: host.run(["docker", "stop", "--time", str(STOP_GRACE), *names], SOON))

        outcomes = each(list(dict.fromkeys(process.host for process in running)), end)
        lost = [outcome.host for outcome in outcomes if isinstance(outcome.error, ConnectionLost)]
        self._out_of_reach |= set(lost)
        deadline = time.monotonic() + SOON
        for process in (process for process in running if process.host not in lost):
            with contextlib.suppress(TestbedError, TimeoutError):
                process.wait(max(0.0, deadline - time.monotonic()))
        if lost:
            fix = "what runs there goes on until `fab stop` reaches it"
            raise ConnectionLost(f"{', '.join(map(str, lost))}: not reached to stop the ranks; {fix}")

    def put(self, node: int, local: Path, remote: Path) -> None:
        """Copy a file to a host."""
        with contextlib.closing(self._hosts[node].files()) as session:
            session.put(str(local), str(remote))

    def get(self, node: int, remote: Path, local: Path) -> None:
        """Copy a file from a host."""
        with contextlib.closing(self._hosts[node].files()) as session:
            session.get(str(remote), str(local))

    def kill(self, node: int) -> None:
        """SIGKILL the host's containers."""
        self._engine(node, "kill")

    def pause(self, node: int) -> None:
        """Freeze them."""
        self._engine(node, "pause")

    def resume(self, node: int) -> None:
        """Let them go on."""
        self._engine(node, "unpause")

    def _engine(self, node: int, verb: str) -> None:
        host = self._hosts[node]
        names = [process.name for process in self._started if process.host is host and not process.ended]
        if names:
            with contextlib.suppress(CommandFailed):  # it has ended meanwhile
                host.run(["docker", verb, *names], SOON)

    def limit_memory(self, node: int) -> None:
        """A little more than the rank's container uses now."""
        host = self._hosts[node]
        for process in self._started:
            if process.host is host and not process.ended:
                shown = host.run(["docker", "stats", "--no-stream", "--format", "{{.MemUsage}}", process.name], SOON)
                limit = str(parse_size(shown.split("/")[0].strip()) + MEMORY_LEFT)
                host.run(["docker", "update", "--memory", limit, "--memory-swap", limit, process.name], SOON)

    def unlimit_memory(self, node: int) -> None:
        """Nothing to do: a rank that starts again does so in a new container."""

    def cut(self, node: int) -> None:
        """Not here, nor anything else that touches what a host has for others too."""
        raise Unavailable(f"{UNTOUCHED}. Use --on compose or netns.")

    def join(self, node: int) -> None:
        self.cut(node)

    def set_rate(self, node: int, rate: int | None) -> None:
        self.cut(node)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        self.cut(node)


def write_note(folder: Path, run: str, hosts: Sequence[Host]) -> None:
    """Which run on which hosts this folder is of."""
    write_whole(folder / NOTE, json.dumps({"id": run, "nodes": [host.name for host in hosts]}, indent=1))


def remove_run(host: Host, run: str, place: PurePosixPath) -> None:
    """The containers and the folder of one run."""
    remove_containers(host, f"{RUN_LABEL}={run}")
    host.run(["rm", "-rf", str(place)], SOON)
    home = place.parent.parent
    assert home.name == HOME
    host.run(["sh", "-c", 'rmdir "$0" "$1" 2>/dev/null || true', str(place.parent), str(home)], SOON)
