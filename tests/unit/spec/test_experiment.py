"""Experiment: a base and its axes give the same list of runs every time, each with its own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.experiment import MAX_FILE_BYTES, Experiment, merge, read_toml, run_name, set_key, with_settings
from testbed.spec.words import Place, reading

FILE = """
title = "Does the ring pay?"
repeats = 2

[base]
model = "lenet5"
batch = 64
steps = 12
link.rate = "1gbit"

[axes]
mode = ["single", "ring/bucket:5MiB", "ddp"]
"link.rate" = ["200mbit", "1gbit"]
nodes = [2, 4]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "pays.toml"
    target.write_text(FILE)
    return target


def experiment(**values: Any) -> Experiment:
    return Experiment.load({"name": "e", "title": "?"} | values, "e.toml")


def test_a_file_becomes_one_run_per_cell_and_repeat(path: Path) -> None:
    runs = Experiment.read(path).runs()
    assert len(runs) == 3 * 2 * 2 * 2
    assert {run.experiment for run in runs} == {"pays"}
    assert {run.model for run in runs} == {"lenet5"}
    assert {run.link.rate for run in runs} == {200_000_000, 10**9}


def test_the_first_axis_varies_slowest_and_repeats_come_round_by_round(path: Path) -> None:
    runs = Experiment.read(path).runs()
    assert [run.name for run in runs[:5]] == [
        "single-rate_200mbit-nodes_2-r0",
        "single-rate_200mbit-nodes_4-r0",
        "single-rate_1gbit-nodes_2-r0",
        "single-rate_1gbit-nodes_4-r0",
        "ring_bucket_5MiB-rate_200mbit-nodes_2-r0",
    ]
    assert [run.name.removesuffix("-r1") for run in runs[12:]] == [run.name.removesuffix("-r0") for run in runs[:12]]


def test_the_order_is_the_same_every_time_and_names_are_unique(path: Path) -> None:
    first, second = Experiment.read(path).runs(), Experiment.read(path).runs()
    assert first == second
    assert len({run.name for run in first}) == len(first)


def test_making_the_runs_twice_does_not_change_the_experiment() -> None:
    sweep = experiment(base={"optimizer": {"lr": 0.5}}, axes={"optimizer.lr": [0.1, 0.2]})
    assert [run.optimizer.lr for run in sweep.runs()] == [0.1, 0.2]
    assert sweep.base == {"optimizer": {"lr": 0.5}}
    assert sweep.runs() == sweep.runs()


def test_without_axes_there_is_one_run_and_without_repeats_no_suffix() -> None:
    assert [run.name for run in experiment().runs()] == ["base"]
    assert [run.name for run in experiment(repeats=2).runs()] == ["base-r0", "base-r1"]


def test_cells_are_run_in_addition_to_the_product_of_the_axes_and_come_first() -> None:
    """A single-node baseline has no number of nodes to be swept over."""
    runs = experiment(cells=[{"mode": "single", "link.rate": "1gbit"}], axes={"nodes": [2, 4]}).runs()
    assert [run.name for run in runs] == ["single-rate_1gbit", "nodes_2", "nodes_4"]
    assert (str(runs[0].mode), runs[0].link.rate, runs[1].link.rate) == ("single", 10**9, None)


def test_cells_alone_are_an_experiment() -> None:
    runs = experiment(cells=[{"mode": "ring"}, {"mode": "ddp"}]).runs()
    assert [run.name for run in runs] == ["ring", "ddp"]


def test_the_experiments_of_this_repository_are_readable() -> None:
    files = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))
    assert files
    for file in files:
        runs = Experiment.read(file).runs()
        assert len({run.name for run in runs}) == len(runs) > 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"axes": {"mode": ["ring", "ring/flat", "ring"]}}, "two runs would have the same name"),
        ({"axes": {"seed": list(range(101)), "nodes": list(range(100))}}, "more than 10000 runs"),
        ({"axes": {f"k{n}": list(range(100)) for n in range(10)}}, "more than 10000 runs"),
        ({"axes": {f"k{n}": [1, 2] for n in range(20_000)}}, "more than 10000 runs"),  # no number that prints
        ({"cells": [{"seed": n} for n in range(5001)], "repeats": 2}, "more than 10000 runs"),
        ({"axes": {"mode": ["star"]}}, "experiment e, run star: mode = 'star': unknown algorithm"),
        ({"axes": {"sped": [1]}}, "unknown key 'sped'"),
        ({"axes": {"model.x": [1]}, "base": {"model": "lenet5"}}, "'model' holds 'lenet5', not a table"),
        ({"repeats": 0}, "repeats = 0"),
        ({"axis": {}}, "unknown key 'axis'; known keys: axes, base,"),
        ({"name": "../up"}, "name = '../up'"),
        ({"axes": {"mode": []}}, "axes.mode"),
    ],
)
def test_a_bad_experiment_is_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refusal:
        experiment(**values).runs()
    assert sentence in str(refusal.value)


def test_a_file_that_is_missing_broken_or_huge_is_refused(tmp_path: Path) -> None:
    broken, huge, binary = tmp_path / "broken.toml", tmp_path / "huge.toml", tmp_path / "binary.toml"
    broken.write_text("title = ")
    huge.write_text("#" * (MAX_FILE_BYTES + 1))
    binary.write_bytes(b"\xff\xfe")
    for path, sentence in (
        (tmp_path / "none.toml", "cannot be read"),
        (tmp_path, "cannot be read"),
        (broken, "not TOML"),
        (binary, "not TOML"),
        (huge, f"at most {MAX_FILE_BYTES}"),
    ):
        with pytest.raises(SpecError, match=sentence):
            read_toml(path)


def test_a_dotted_key_reaches_into_tables() -> None:
    values: dict[str, Any] = {"link": {"rate": "1gbit"}}
    set_key(values, "link.delay", "1ms")
    set_key(values, "overrides.node1.cpus", 0.5)
    set_key(values, "nodes", 3)
    assert values == {
        "link": {"rate": "1gbit", "delay": "1ms"},
        "overrides": {"node1": {"cpus": 0.5}},
        "nodes": 3,
    }


def test_merging_lays_one_over_the_other_and_leaves_both_alone() -> None:
    below = {"link": {"rate": "1gbit", "queue": "50ms"}, "nodes": 4}
    above = {"link": {"rate": "10mbit"}, "optimizer.lr": 0.1, "mode": "ring"}
    merged = merge(below, above)
    assert merged == {
        "link": {"rate": "10mbit", "queue": "50ms"},
        "nodes": 4,
        "optimizer": {"lr": 0.1},
        "mode": "ring",
    }
    assert below == {"link": {"rate": "1gbit", "queue": "50ms"}, "nodes": 4}
    assert above == {"link": {"rate": "10mbit"}, "optimizer.lr": 0.1, "mode": "ring"}


TABLES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(TABLES, TABLES)
def test_merging_is_idempotent_and_the_upper_one_wins(below: dict[str, Any], above: dict[str, Any]) -> None:
    merged = merge(below, above)
    assert merge(merged, above) == merged
    assert merge({}, above) == above
    assert merge(below, {}) == below
    for key, value in above.items():
        if not isinstance(value, dict):
            assert merged[key] == value


def test_settings_are_read_as_toml_or_as_text_and_the_values_stay_as_they_were() -> None:
    values: dict[str, Any] = {"optimizer": {"lr": 0.02, "momentum": 0.9}}
    settings = ["optimizer.lr=0.1", "probe = false", "data.shares=[1, 2]", "mode=ring/flat", "link.rate=50mbit"]
    assert with_settings(values, settings) == {
        "optimizer": {"lr": 0.1, "momentum": 0.9},
        "probe": False,
        "data": {"shares": [1, 2]},
        "mode": "ring/flat",
        "link": {"rate": "50mbit"},
    }
    assert values == {"optimizer": {"lr": 0.02, "momentum": 0.9}}


@pytest.mark.parametrize("setting", ["lr", "=1", " =1", ""])
def test_a_setting_that_is_no_key_and_value_is_refused_by_its_flag(setting: str) -> None:
    with pytest.raises(SpecError, match=r"^SET '.*': must be KEY=VALUE\. Write e\.g\. SET"):
        with reading(Place.COMPOSE):
            with_settings({}, [setting])


def test_the_name_of_a_run_has_its_mode_and_nodes_in_letters_of_a_path() -> None:
    assert run_name("ring/bucket:5MiB", 4) == "ring_bucket_5mib-n4" and run_name("///", 2) == "run-n2"
