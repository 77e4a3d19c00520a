"""Tasks for real hosts: send the image to the hosts, run one rank per host, and copy the results here.

    cp inventory/hosts.example.toml inventory/hosts.toml    # edit it
    fab doctor deploy run --mode ring
Each task calls the command of `testbed hosts` with the same name; see `fab --list` and `fab --help TASK`.
--inventory, --nodes and --accept-new apply to all tasks of the command line, wherever they stand in it.
"""

from __future__ import annotations

import sys
from inspect import Parameter, Signature
from typing import Any

import typer
from invoke import Context, Exit, Task

from testbed.control.cli.hosts import app, line_options
from testbed.control.cli.main import call
from testbed.spec.errors import TestbedError


def make_task(name: str, command: Any) -> Task:
    """Return a task that calls a command of `testbed hosts`. Invoke reads its options from the signature of `body`."""
    options = {option.opts[0].lstrip("-").replace("-", "_"): option for option in command.params}

    def body(context: Context, **values: Any) -> None:
        try:
            values |= line_options(sys.argv, name, values)
        except TestbedError as error:
            raise Exit(f"fab: {error}", error.exit_code) from None
        argv = ["hosts", name]
        for key, option in options.items():
            for value in values[key] if option.multiple else [values[key]]:
                if value not in (None, False):
                    flag = option.opts[0]
                    argv.append(flag if value is True else f"{flag}={value}" if flag.startswith("-") else value)
        if code := call("fab", argv):
            raise Exit(code=code)

    def parameter(key: str, option: Any) -> Parameter:
        default = Parameter.empty if option.required else False if getattr(option, "is_flag", False) else None
        return Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=default)

    own = [parameter(key, option) for key, option in options.items()]
    body.__doc__ = command.help
    body.__signature__ = Signature([Parameter("context", Parameter.POSITIONAL_OR_KEYWORD), *own])  # type: ignore[attr-defined]
    defaults = {key: f" [default: {each.default}]" for key, each in options.items() if isinstance(each.default, str)}
    shown = {key: option.help + defaults.get(key, "") for key, option in options.items()}
    repeated = [key for key, option in options.items() if option.multiple]
    return Task(body, name=name, help=shown, iterable=repeated, auto_shortflags=False)


for _name, _command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
    globals()[_name] = make_task(_name, _command)
