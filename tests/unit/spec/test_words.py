"""A message names a setting and a folder in the words of the place where it is read."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import testbed
from testbed.control.cli.main import app
from testbed.spec.errors import SpecError
from testbed.spec.experiment import spec_from_flags
from testbed.spec.run import RunSpec
from testbed.spec.words import OPTIONS, Place, current_place, name_of, reading, set_place, setting, shown_path

COMMAND_LINE, COMPOSE, LAUNCHER, PYTHON, FILE = Place
WORDS: dict[tuple[str, Any], dict[Place, str]] = {  # (key, value): what sets it; LAUNCHER as COMPOSE unless it differs
    ("link.rate", "200mbit"): {
        COMMAND_LINE: "--rate 200mbit",
        COMPOSE: "RATE=200mbit",
        PYTHON: "rate='200mbit'",
        FILE: "link.rate = '200mbit'",
    },
    ("nodes", 2): {
        COMMAND_LINE: "--nodes 2",
        COMPOSE: "NODES=2",
        LAUNCHER: "WORLD_SIZE=2",
        PYTHON: "nodes=2",
        FILE: "nodes = 2",
    },
    ("data.name", "synthetic"): {
        COMMAND_LINE: "--data synthetic",
        COMPOSE: "DATA=synthetic",
        PYTHON: "data='synthetic'",
        FILE: "data.name = 'synthetic'",
    },
    ("batch_per_rank", 8): {
        COMMAND_LINE: "--batch-per-rank 8",
        COMPOSE: "SET=batch_per_rank=8",
        PYTHON: "batch_per_rank=8",
        FILE: "batch_per_rank = 8",
    },
    ("probe", False): {
        COMMAND_LINE: "--set probe=false",
        COMPOSE: "SET=probe=false",
        PYTHON: "probe=False",
        FILE: "probe = false",
    },
    ("node.congestion", "bbr"): {
        COMMAND_LINE: "--set node.congestion=bbr",
        COMPOSE: "CONGESTION=bbr",
        PYTHON: "congestion='bbr'",
        FILE: "node.congestion = 'bbr'",
    },
    ("keep_going", True): {
        COMMAND_LINE: "--keep-going",
        COMPOSE: "KEEP_GOING=true",
        PYTHON: "keep_going=True",
        FILE: "keep_going = true",
    },
    ("data.shares", (1, 2)): {
        COMMAND_LINE: "--set data.shares=[1, 2]",
        COMPOSE: "SET=data.shares=[1, 2]",
        PYTHON: "data.shares=(1, 2)",
        FILE: "data.shares = [1, 2]",
    },
}


@pytest.mark.parametrize(("key", "value"), WORDS, ids=lambda each: str(each))
def test_a_setting_is_written_as_the_reader_writes_it(key: str, value: object) -> None:
    found = WORDS[key, value]
    for place in Place:
        words = found.get(place) or found[COMPOSE]
        with reading(place):
            assert setting(key, value) == words and words.startswith(name_of(key))


def test_every_option_exists_on_the_command_line() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {f"--{name.replace('_', '-')}" for name in OPTIONS} <= known


RULES = {  # flags: the sentence on the command line, and with docker compose up
    ("batch", 10): (
        "--batch 10: must be divisible by the 4 ranks. Use 8 or 12, or --batch-per-rank.",
        "BATCH=10: must be divisible by the 4 ranks. Use 8 or 12.",
    ),
    ("steps", 2): (
        "--steps 2: the first 2 steps are left out of all times, so no step would remain. "
        "Use --steps 3 or more, or --set warmup=0.",
        "STEPS=2: the first 2 steps are left out of all times, so no step would remain. "
        "Use STEPS=3 or more, or SET=warmup=0.",
    ),
    ("steps", "many"): (
        "--steps 'many': must be a whole number. Write e.g. --steps 40.",
        "STEPS='many': must be a whole number. Write e.g. STEPS=40.",
    ),
    ("rate", "fast"): (
        "--rate 'fast': needs a number and one of bit, kbit, mbit, gbit. Write e.g. 200mbit.",
        "RATE='fast': needs a number and one of bit, kbit, mbit, gbit. Write e.g. 200mbit.",
    ),
    ("data", "imagenet"): (
        "--data 'imagenet': is not a known data set. "
        "Use one of cifar10, mnist, synthetic, text, text:FILE or FILE.py:FUNCTION.",
        "DATA='imagenet': is not a known data set. "
        "Use one of cifar10, mnist, synthetic, text, text:FILE or FILE.py:FUNCTION.",
    ),
    ("fault", "kill:rank9@step3"): (
        "--fault 'kill:rank9@step3': there are ranks 0 to 3. Name one of them, or rank? for any.",
        "SET=faults='kill:rank9@step3': there are ranks 0 to 3. Name one of them, or rank? for any.",
    ),
}


@pytest.mark.parametrize(("flag", "value"), RULES, ids=lambda each: str(each))
def test_a_refusal_names_the_flag_or_the_variable(flag: str, value: object) -> None:
    for place, sentence in zip((Place.COMMAND_LINE, Place.COMPOSE), RULES[flag, value], strict=True):
        with reading(place), pytest.raises(SpecError) as refusal:
            spec_from_flags({flag: value})
        assert str(refusal.value) == sentence


def test_a_value_of_a_file_is_named_as_the_file_has_it_wherever_it_is_read() -> None:
    with reading(Place.COMPOSE), pytest.raises(SpecError, match=r"^spec\.json: batch = 10: .*, or batch_per_rank\.$"):
        RunSpec.load({"batch": 10}, "spec.json")
    assert current_place() is Place.COMMAND_LINE


@pytest.fixture
def in_a_container(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TESTBED_RUNS", "/runs")
    monkeypatch.setenv("TESTBED_DATA", "/data")
    set_place(Place.COMPOSE)
    yield
    set_place(Place.COMMAND_LINE)


def test_the_place_of_a_process_holds_in_all_its_threads(in_a_container: None) -> None:
    found: list[Place] = []
    thread = threading.Thread(target=lambda: found.append(current_place()))
    thread.start()
    thread.join()
    assert found == [Place.COMPOSE]


def test_a_mounted_folder_is_named_as_the_user_knows_it(in_a_container: None) -> None:
    assert [shown_path(path) for path in ("/data", "/data/mnist", "/runs/compose/x", "/tmp/x", "/database")] == [
        "./data",
        "./data/mnist",
        "./runs/compose/x",
        "/tmp/x",
        "/database",
    ]
    set_place(Place.LAUNCHER)
    assert shown_path("/data/mnist") == "/data/mnist"


MESSAGE_FOLDERS = ("spec", "results", "net", "data", "rank")  # whose messages are read in several places
FLAG = re.compile(rf"--(set|{'|'.join(name.replace('_', '-') for name in OPTIONS)})\b")


def test_no_message_that_is_read_in_several_places_names_an_option_itself() -> None:
    """A command in backticks may have options: `testbed run --on compose --nodes 8`."""
    package = Path(testbed.__file__).parent
    found = []
    for path in (path for folder in MESSAGE_FOLDERS for path in (package / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        strings = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant) and node not in parts]
        docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in strings if path.name != "words.py" else ():
            text = re.sub(r"`[^`]*`", "", ast.unparse(node))
            if " " in text and node not in docs and FLAG.search(text):  # without a space it is an argument
                found.append(f"{path.name}:{node.lineno}: {text}")
    assert found == []
