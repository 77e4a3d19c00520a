"""The hub takes out what raises, and a line of the script is found on the stack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.attach import events
from testbed.attach.events import Collective, Hub, Part


class Good(Part):
    def __init__(self) -> None:
        self.calls = 0

    def group_made(self) -> None:
        self.calls += 1

    def collective_ended(self, collective: Collective) -> None:
        self.calls += 1


class Bad(Part):
    def group_made(self) -> None:
        raise ValueError("no")


def make_hub(*parts: Part, fault: str = "") -> tuple[Hub, list[tuple[str, str]]]:
    reports: list[tuple[str, str]] = []
    return Hub(lambda seam, error: reports.append((seam, error)), lambda: list(parts), fault), reports


def test_a_part_that_raises_is_taken_out_and_named() -> None:
    good = Good()
    hub, reports = make_hub(Bad(), good)
    hub.emit("group_made")
    hub.emit("group_made")
    assert good.calls == 2 and hub.parts == [good]
    assert reports == [("Bad.group_made", "ValueError: no")]


def test_a_part_that_is_added_or_removed_later_counts_from_then_on() -> None:
    first, second = Good(), Good()
    hub, _ = make_hub(first)
    hub.emit("group_made")
    hub.parts.append(second)
    hub.emit("group_made")
    hub.parts.remove(first)
    hub.emit("group_made")
    assert (first.calls, second.calls) == (2, 2)


def test_a_seam_that_raises_is_off_and_named_once() -> None:
    hub, reports = make_hub()
    assert hub.observe("data", lambda: 1 / 0) is None
    assert hub.observe("data", lambda: 7) is None and hub.observe("group", lambda: 7) == 7
    assert [seam for seam, _ in reports] == ["data"]


@pytest.mark.parametrize("fault", ["data", "Good.group_made"])
def test_a_test_can_make_a_seam_or_a_part_raise(fault: str) -> None:
    hub, reports = make_hub(Good(), fault=fault)
    hub.observe("data", lambda: None)
    hub.emit("group_made")
    assert [seam for seam, _ in reports] == [fault]


def test_an_exit_of_the_script_passes_through() -> None:
    hub, _ = make_hub()
    with pytest.raises(SystemExit):
        hub.observe("data", lambda: exec("raise SystemExit(0)"))


def test_a_collective_ends_once() -> None:
    good = Good()
    hub, _ = make_hub(good)
    collective = Collective("all_reduce", 8, 1.0, "", "sync")
    hub.end(collective, 2.0)
    hub.end(collective, 3.0)
    assert collective.ended == 2.0 and good.calls == 1


def test_a_forked_process_has_new_parts() -> None:
    hub = Hub(lambda seam, error: None, lambda: [Good()])
    first = hub.parts[0]
    hub.start()
    assert hub.parts[0] is not first


def test_the_line_of_the_script_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "tools" / "sync.py"
    code = compile("\n\ndef average():\n    return caller()\n", str(script), "exec")
    names = {"caller": events.caller}
    exec(code, names)
    assert names["average"]() == (f"tools{os.sep}sync.py:4", "")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "maker"),
    [
        ("/x/site-packages/torch/nn/parallel/distributed.py", "DistributedDataParallel"),
        ("/x/site-packages/torch/distributed/fsdp/_fully_shard/a.py", "FSDP"),
        ("/x/site-packages/lightning/fabric/a.py", "lightning"),
        ("/x/site-packages/torch/nn/functional.py", ""),
        (os.__file__, ""),
        (events.__file__, ""),
    ],
)
def test_libraries_are_no_lines_of_the_script(path: str, maker: str) -> None:
    assert events._classify(path) == (True, "", maker)
