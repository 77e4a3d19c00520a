"""RunSpec: every rule refuses with the value, the rule and the way out; spec.json is the whole run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from testbed.spec.errors import SchemaError, SpecError
from testbed.spec.experiment import merge
from testbed.spec.run import OF_OUR_LOOP, SCHEMA, RunSpec


def load(**values: Any) -> RunSpec:
    return RunSpec.load(values, "here")


def test_the_default_run_is_vgg11_on_four_nodes() -> None:
    spec = load()
    assert (str(spec.mode), spec.nodes, spec.model, spec.data.name) == ("ring", 4, "vgg11", "cifar10")
    assert (spec.global_batch, spec.local_batch(0), spec.steps, spec.warmup) == (256, 64, 40, 2)


def test_a_single_run_has_one_rank_whatever_the_nodes() -> None:
    spec = load(mode="single", nodes=4, batch=30)
    assert (spec.world, spec.local_batch(0)) == (1, 30)


def test_the_batch_can_be_given_per_rank() -> None:
    assert load(batch_per_rank=32, nodes=3).global_batch == 96
    assert load(batch_per_rank=32, nodes=3, mode="single").global_batch == 32


def test_epochs_replace_the_default_number_of_steps() -> None:
    assert load(epochs=2).steps is None


def test_shares_are_the_local_batches() -> None:
    spec = load(nodes=3, batch=16, data={"shares": [3, 5, 8]})
    assert [spec.local_batch(rank) for rank in range(3)] == [3, 5, 8]
    assert spec.uneven


def test_a_single_run_ignores_the_shares_of_its_siblings() -> None:
    spec = load(mode="single", batch=16, data={"shares": [3, 5, 8]})
    assert (spec.uneven, spec.local_batch(0)) == (False, 16)


def test_replicas_may_differ_only_where_the_mistake_is_shown() -> None:
    assert load().replicas_must_agree
    assert not load(placement="after-step").replicas_must_agree


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().nodes = 5  # type: ignore[misc]


# --- every rule, with the value and the way out ------------------------------------------------------------------

REFUSED = {
    "one node": ({"nodes": 1}, "nodes = 1: mode ring needs at least 2. Use mode = 'single', or nodes = 2."),
    "batch does not divide": (
        {"batch": 10, "nodes": 4},
        "batch = 10: must be divisible by the 4 ranks. Use 8 or 12, or batch_per_rank.",
    ),
    "batch below the ranks": ({"batch": 3, "nodes": 4}, "batch = 3: must be divisible by the 4 ranks. Use 4, or"),
    "batch said twice": (
        {"batch": 8, "batch_per_rank": 2},
        "batch = 8: batch_per_rank = 2 sets the same value. Give one of them.",
    ),
    "accumulate": (
        {"batch": 8, "nodes": 4, "accumulate": 3},
        "accumulate = 3: must divide the 2 images of a rank. Use one of 1, 2.",
    ),
    "accumulate with shares": (
        {"batch": 6, "nodes": 2, "accumulate": 2, "data": {"shares": [3, 3]}},
        "accumulate = 2: must divide the 3 images of a rank. Use one of 1, 3.",
    ),
    "shares of another sum": (
        {"batch": 16, "nodes": 3, "data": {"shares": [3, 5, 9]}},
        "data.shares = [3, 5, 9]: must be 3 numbers of at least 1 that add up to the batch of 16. Change",
    ),
    "shares of another length": (
        {"batch": 8, "nodes": 3, "data": {"shares": [3, 5]}},
        "data.shares = [3, 5]: must be 3 numbers",
    ),
    "an empty share": (
        {"batch": 8, "nodes": 2, "data": {"shares": [0, 8]}},
        "data.shares = [0, 8]: must be 2 numbers of at least 1",
    ),
    "shares with every": (
        {"mode": "ring/every:2", "batch": 8, "nodes": 2, "data": {"shares": [3, 5]}},
        "mode ring/every:2 averages parameters, which weights all ranks alike. Use a mode without every:K.",
    ),
    "fewer images than ranks": (
        {"nodes": 4, "data": {"name": "synthetic", "subset": 3}},
        "data.subset = 3: one step needs at least 4 images. Request more.",
    ),
    "override of no node": (
        {"nodes": 2, "overrides": {"node2": {"cpus": 0.1}}},
        "overrides.node2: the run has 2 nodes. Use node0 or node1.",
    ),
    "after-step of ddp": (
        {"mode": "ddp", "placement": "after-step"},
        "placement = 'after-step': mode ddp has no gradient exchange",
    ),
    "after-step of server": (
        {"mode": "server", "placement": "after-step"},
        "Use mode with gather, allreduce, ring, tree or halving.",
    ),
    "after-step of the control": ({"mode": "none", "placement": "after-step"}, "mode none has no gradient exchange"),
    "after-step of single": ({"mode": "single", "placement": "after-step"}, "mode single has no gradient exchange"),
    "after-step of every": (
        {"mode": "ring/every:2", "placement": "after-step"},
        "mode ring/every:2 has no gradient exchange",
    ),
    "only warm-up": (
        {"steps": 2},
        "steps = 2: the first 2 steps are left out of all times, so no step would remain.",
    ),
    "unknown mode": ({"mode": "star"}, "mode = 'star': unknown algorithm 'star'. Known: single,"),
    "illegal cell": ({"mode": "ddp/flat"}, "mode = 'ddp/flat': ddp takes bucket only"),
    "rate": ({"link": {"rate": "fast"}}, "link.rate = 'fast': needs a number and one of"),
    "unknown key": ({"bacth": 8}, "unknown key 'bacth'; known keys: accumulate, batch, batch_per_rank,"),
    "unknown key inside": ({"data": {"nam": "mnist"}}, "unknown key 'data.nam'; known keys: augment, name, partition,"),
    "unknown key of a node": (
        {"overrides": {"node2": {"rate": "50mbit"}}},
        "unknown key 'overrides.node2.rate'; known keys: cpus, link",
    ),
    "unknown key of a node's link": (
        {"overrides": {"node2": {"link": {"speed": "50mbit"}}}},
        "unknown key 'overrides.node2.link.speed'; known keys: delay, jitter, loss, queue, rate",
    ),
    "a key where a node's name must be": (
        {"overrides": {"link": {"rate": "50mbit"}}},
        "unknown key 'overrides.link.rate'; known keys: cpus, link",
    ),
    "unknown data": (
        {"data": {"name": "imagenet"}},
        "data.name = 'imagenet': is not a known data set. "
        "Use one of cifar10, mnist, synthetic, text, text:FILE or FILE.py:FUNCTION.",
    ),
    "negative seed": ({"seed": -1}, "seed = -1"),
    "no steps": ({"steps": 0}, "steps = 0"),
    "words for numbers": ({"nodes": "four"}, "nodes = 'four'"),
    "a path as name": ({"name": "../../etc/passwd"}, "name = '../../etc/passwd'"),
    "a name with a line break": ({"name": "run\n"}, r"name = 'run\n'"),
    "infinite deadline": ({"deadline": float("inf")}, "deadline = inf"),
    "infinite learning rate": ({"optimizer": {"lr": float("inf")}}, "optimizer.lr = inf"),
    "learning rate that is none": ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan"),
    "a deadline no clock can hold": ({"deadline": 1e300}, "deadline = 1e+300"),
    "a shell word as congestion control": ({"node": {"congestion": "cubic; reboot"}}, "node.congestion"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rule_refuses_with_value_and_way_out(case: str) -> None:
    values, sentence = REFUSED[case]
    with pytest.raises(SpecError) as refusal:
        load(**values)
    assert str(refusal.value).startswith("here: ")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_bad_values_are_named_in_one_refusal() -> None:
    with pytest.raises(
        SpecError, match=r"nodes = 0: must be at least 1\. Write .*\. seed = -1: must be at least 0\. Write"
    ):
        load(seed=-1, nodes=0)


def test_an_override_replaces_the_value_of_all_nodes() -> None:
    own = {"node1": {"cpus": 0.1}, "node2": {"link": {"rate": "10mbit"}}}
    spec = load(nodes=4, node={"cpus": 0.4}, link={"rate": "200mbit"}, overrides=own)
    assert [spec.cpus_of(rank) for rank in range(3)] == [0.4, 0.1, 0.4]
    assert [spec.link_of(rank).rate for rank in range(3)] == [200_000_000, 200_000_000, 10_000_000]
    assert spec.links_requested == 'link {"rate":"200mbit"}, link {"rate":"10mbit"} of node2'
    assert load(overrides=own).links_requested == 'link {"rate":"10mbit"} of node2'
    assert load(overrides={"node1": {"cpus": 0.1, "link": {}}}).links_requested == ""


# --- spec.json ---------------------------------------------------------------------------------------------------

FULL = {
    "mode": "ring/bucket:5MiB/every:4@100",
    "nodes": 3,
    "model": "lenet5",
    "dtype": "float64",
    "batchnorm": "average",
    "data": {"name": "mnist", "subset": 99, "partition": "fixed", "augment": False},
    "batch_per_rank": 4,
    "epochs": 2,
    "accumulate": 2,
    "optimizer": {"name": "adam", "lr": 0.1, "schedule": "cosine", "clip": 1.5, "base_batch": 64},
    "node": {"cpus": 0.4, "congestion": None},
    "link": {"rate": "200mbit", "delay": "1500us", "queue": "50ms"},
    "overrides": {"node2": {"cpus": 0.1, "link": {"rate": "10mbit"}}},
    "port": 29501,
}


@pytest.mark.parametrize(
    "values", [{}, FULL, {"mode": "single"}, {"batch": 16, "nodes": 3, "data": {"shares": [3, 5, 8]}}]
)
def test_a_spec_survives_the_way_through_json(values: dict[str, Any]) -> None:
    spec = load(**values)
    assert RunSpec.from_json(spec.to_json(), "spec.json") == spec


def test_spec_json_spells_every_value_out_in_the_words_people_use() -> None:
    written = json.loads(load(**FULL).to_json())
    assert written["schema"] == SCHEMA
    assert written["mode"] == FULL["mode"]
    assert written["link"]["rate"] == "200mbit"
    assert written["overrides"]["node2"]["link"]["rate"] == "10mbit"
    assert merge(written, FULL) == written | {"data": written["data"]}  # nothing that was requested is missing
    assert set(written) == {field.alias or name for name, field in RunSpec.model_fields.items()}


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None])
def test_another_schema_is_refused_by_number_before_anything_else(schema: object) -> None:
    text = json.dumps({"schema": schema, "a key of the future": 1})
    with pytest.raises(SchemaError, match=f"spec.json: schema {schema}, this testbed reads schema {SCHEMA}"):
        RunSpec.from_json(text, "spec.json")


@pytest.mark.parametrize(("text", "sentence"), [("{", "not JSON"), ("[]", "holds a list, not a run"), ("", "not JSON")])
def test_a_file_that_is_no_spec_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        RunSpec.from_json(text, "spec.json")


def test_the_files_of_a_script_lack_what_our_own_loop_trains() -> None:
    script = {"argv": ["python", "main.py"], "folder": "/tmp"}
    spec = RunSpec.load({"mode": "script", "script": script, "nodes": 3}, "")
    written = json.loads(spec.to_json())
    assert not set(OF_OUR_LOOP) & set(written) and set(OF_OUR_LOOP) < set(json.loads(RunSpec().to_json()))
    assert RunSpec.from_json(spec.to_json(), "spec.json") == spec
    assert RunSpec.load(spec.model_dump(mode="json", by_alias=True), "") == spec
