"""Real hosts: the image on each of them, one rank each, the results here.

    cp inventory/hosts.example.toml inventory/hosts.toml    # edit it
    fab doctor deploy run --mode ring
Thin tasks over testbed/control/substrates/hosts*.py; `fab --list` and `fab --help TASK` explain them.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke import Context, Exit, task
from invoke.parser import Parser

from testbed.control.cli import hosts as commands
from testbed.spec.errors import TestbedError

HELP = {
    "inventory": "the hosts; holds for the whole command line [default: TESTBED_INVENTORY or inventory/hosts.toml]",
    "accept-new": "trust host keys that nobody has seen before; changed ones are refused all the same",
    "mode": "how gradients are synchronised; `testbed modes` lists them [default: ring]",
    "nodes": "only the first so many hosts of the inventory; holds for the whole command line",
    "model": "vgg11, resnet18, lenet5, or a torchvision name [default: vgg11]",
    "data": "cifar10, mnist or synthetic [default: cifar10]",
    "batch": "images per step over all ranks [default: 256]",
    "batch-per-rank": "the other way to say it",
    "steps": "training steps [default: 40]",
    "seed": "of parameters, data order and augmentation [default: 0]",
    "rate": "refused: the network of real hosts is measured, never shaped",
    "on": "refused: fab is for real hosts; `testbed run --on` for other places",
    "fault": "go wrong on purpose, e.g. kill:rank2@step10; kill, exit, pause and oom can be had on hosts",
    "retries": "restarts from the last checkpoint (--set checkpoint=K) [default: 0]",
    "set": "KEY=VALUE: any other key of the spec, e.g. optimizer.lr=0.1",
    "out": "run folder [default: runs/adhoc/MODE-nN-TIME]",
    "json": "print one JSON document and nothing else",
    "fresh": "run finished cells again; old folders are set aside",
    "file": "an experiment, e.g. experiments/epoch.toml",
    "run": "one run, as `fab status` names it [default: all]",
    "lines": "how many of the last lines [default: 40]",
    "all": "also what still runs, and results that were not collected",
}


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def hosts_task(body: Callable[..., int]) -> Any:
    """A task whose errors are one sentence and an exit code; all its values are text until the spec reads them."""

    @functools.wraps(body)
    def wrapped(context: Context, *args: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            code = body(context, *args, **kwargs)
        except TestbedError as error:
            raise Exit(f"fab: {error}", error.exit_code) from None
        except KeyboardInterrupt:
            raise Exit("fab: interrupted", 130) from None
        if code:
            raise Exit(code=code)

    names = list(body.__code__.co_varnames[1 : body.__code__.co_argcount])
    iterable = [name for name in ("set_", "fault") if name in names]
    documented = {key: HELP[key] for key in (name.strip("_").replace("_", "-") for name in names)}
    return task(wrapped, auto_shortflags=False, help=documented, iterable=iterable)


def _anywhere() -> None:
    """Let --inventory also stand before the first task, where Invoke would take it for a flag of its own."""
    parse = Parser.parse_argv

    def parse_argv(self: Parser, argv: list[str]) -> Any:
        while argv and argv[0].partition("=")[0] == "--inventory":
            argv = argv[1:] if "=" in argv[0] else argv[2:]
        return parse(self, argv)

    Parser.parse_argv = parse_argv  # type: ignore[method-assign]


_anywhere()


def _asked(inventory: str | None, accept_new: bool, nodes: str | None = None) -> commands.Asked:
    return commands.Asked.of(sys.argv, inventory, accept_new, nodes)


@hosts_task
def doctor(c, inventory=None, nodes=None, accept_new=False):
    """One row per host: key, engine, disk, clock, interface, ports, image."""
    return commands.doctor(_asked(inventory, accept_new, nodes))


@hosts_task
def deploy(c, inventory=None, nodes=None, data=None, accept_new=False):
    """Send image and data to the hosts that lack them."""
    return commands.deploy(_asked(inventory, accept_new, nodes), data)


@hosts_task
def run(
    c,
    mode="ring",
    nodes=None,
    model="vgg11",
    data=None,
    batch=None,
    batch_per_rank=None,
    steps=None,
    seed="0",
    set_=None,
    fault=None,
    retries="0",
    out=None,
    rate=None,
    on=None,
    inventory=None,
    accept_new=False,
    json=False,
):
    """Train once, one rank per host, and print what it cost."""
    flags = {"mode": mode, "model": model, "data.name": data, "seed": seed, "link.rate": rate, "on": on}
    flags |= {"batch": batch, "batch_per_rank": batch_per_rank, "steps": steps}
    flags |= {"faults": fault or None, "retries": retries}
    return commands.run(_asked(inventory, accept_new, nodes), flags, set_ or [], Path(out) if out else None, json)


@hosts_task
def sweep(c, file, set_=None, fresh=False, inventory=None, accept_new=False, json=False):
    """Run every cell of an experiment file; finished runs are skipped."""
    return commands.sweep(_asked(inventory, accept_new), Path(file), set_ or [], fresh, json)


@hosts_task
def status(c, inventory=None, accept_new=False):
    """What of ours runs or lies on the hosts."""
    return commands.status(_asked(inventory, accept_new))


@hosts_task
def logs(c, run=None, lines="40", inventory=None, accept_new=False):
    """The last lines of every rank's log, from the hosts."""
    return commands.logs(_asked(inventory, accept_new), run, lines)


@hosts_task
def collect(c, run=None, inventory=None, accept_new=False):
    """Bring home the results of runs whose connection was lost."""
    return commands.collect(_asked(inventory, accept_new), run)


@hosts_task
def stop(c, run=None, inventory=None, accept_new=False):
    """Stop all ranks on the hosts; their files stay for `collect`."""
    return commands.stop(_asked(inventory, accept_new), run)


@hosts_task
def clean(c, all_=False, inventory=None, accept_new=False):
    """Remove every container, file and image of ours from the hosts."""
    return commands.clean(_asked(inventory, accept_new), all_)
