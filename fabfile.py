"""Real hosts: the image on each of them, one rank each, the results here.

    cp inventory/hosts.example.toml inventory/hosts.toml    # edit it
    fab doctor deploy run --mode ring
Each task is the command of `testbed hosts` with that name; `fab --list` and `fab --help TASK` explain them.
--inventory, --nodes and --accept-new hold for the whole line, after whichever task they are.
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


def _help(option: Any) -> str:
    default = option.default if isinstance(option.default, str) else ""
    return f"{option.help or ''}{f' [default: {default}]' if default else ''}"


def make_task(name: str, command: Any) -> Task:
    """A task with the options of a command; it builds the command's arguments and calls it."""
    options = {option.opts[0].lstrip("-").replace("-", "_"): option for option in command.params}

    def body(context: Context, **values: Any) -> None:
        try:
            line = {key: value for key, value in line_options(sys.argv).items() if key in options}
        except TestbedError as error:
            raise Exit(f"fab: {error}", error.exit_code) from None
        words = [] if name == "deploy" and not values["data"] else ["data"]  # a run's data is its own
        values |= {key: value for key, value in line.items() if key not in words}
        argv = ["hosts", name]
        for key, option in options.items():
            for value in values[key] if option.multiple else [values[key]]:
                if value not in (None, False):
                    flag = option.opts[0] if value is True else f"{option.opts[0]}={value}"
                    argv.append(flag if option.opts[0].startswith("-") else str(value))
        if code := call("fab", argv):
            raise Exit(code=code)

    defaults = {key: False if getattr(each, "is_flag", False) else None for key, each in options.items()}
    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD)]
    for key, option in options.items():
        default = Parameter.empty if option.required else defaults[key]
        parameters.append(Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    body.__name__, body.__doc__ = name, command.help
    body.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    repeated = [key for key, option in options.items() if option.multiple]
    texts = {key: _help(option) for key, option in options.items()}
    return Task(body, name=name, help=texts, iterable=repeated, auto_shortflags=False)


for _name, _command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
    globals()[_name] = make_task(_name, _command)
