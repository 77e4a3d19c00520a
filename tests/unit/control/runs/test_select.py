"""Which substrate a run gets, and what is requested of its nodes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from testbed.control.runs import select
from testbed.net import tcp
from testbed.spec.errors import SpecError, Unavailable
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec
from tests.support.fake_substrate import FakeRuns


def spec(**values):
    return RunSpec.load({"nodes": 4, "link": {"rate": "200mbit"}, "node": {"cpus": 0.4}, **values}, "test")


def test_an_override_changes_one_node_and_no_other():
    overrides = {"node2": {"link": {"rate": "50mbit"}}, "node3": {"cpus": 0.2}}
    plans = select.node_plans(spec(overrides=overrides))
    assert [plan.link.rate for plan in plans] == [200_000_000, 200_000_000, 50_000_000, 200_000_000]
    assert [plan.cpus for plan in plans] == [0.4, 0.4, 0.4, 0.2]


def test_single_gets_one_nodes_share():
    (plan,) = select.node_plans(spec(mode="single"))
    assert (plan.name, plan.cpus) == ("node0", 0.4)


def refusing(reason):
    def check(plans):
        raise Unavailable(reason)

    return check


def test_auto_takes_the_first_that_passes_its_check_and_says_why_the_others_do_not():
    types = dict(select.SUBSTRATES)
    for name, reason in {"compose": "no engine", "netns": "no root"}.items():
        types[name] = replace(types[name], check=refusing(reason))
    chosen = select.choose("auto", spec(), types)
    assert chosen.name == "process" and chosen.automatic
    assert "preferred substrates are unavailable: no engine; no root" in chosen.reason
    types["process"] = replace(types["process"], check=refusing("no torch"))
    with pytest.raises(Unavailable, match="no substrate can run this: no engine; no root; no torch"):
        select.choose("auto", spec(), types)


def test_a_substrate_is_checked_once_for_the_same_nodes(tmp_path):
    fake = FakeRuns()
    chosen = select.choose("auto", spec(), {"fake": fake.type})
    chosen.make(spec(seed=1), tmp_path)
    assert len(fake.checks) == 1
    chosen.make(spec(link={"rate": "50mbit"}), tmp_path)  # a cell of a sweep with another link
    assert len(fake.checks) == 2
    select.choose("fake", spec(), {"fake": fake.type}).make(spec(), tmp_path)
    assert len(fake.checks) == 3


def test_where_nothing_is_shaped_links_and_quotas_are_not_in_the_spec():
    chosen = select.choose("process", spec())
    applied = chosen.drop_unsupported(spec(overrides={"node1": {"cpus": 0.1}}))
    assert not applied.link.shaped and applied.node.cpus is None and applied.overrides == {}


def test_a_link_of_one_node_is_refused_like_one_of_all_where_nothing_is_shaped():
    one = spec(link={}, overrides={"node2": {"link": {"rate": "50mbit"}}, "node3": {"cpus": 0.2}})
    with pytest.raises(Unavailable, match=r'^link \{"rate":"50mbit"\} of node2: cannot be shaped here.*--on netns'):
        select.check_shaping(one, select.choose("process", one))
    with pytest.raises(Unavailable, match=r'^link \{"segment":"16KiB"\}: cannot be shaped here'):
        select.check_shaping(spec(link={"segment": "16KiB"}), select.choose("process", one))
    select.check_shaping(one, select.choose("netns", one))
    plain = spec(link={}, faults=["cut:rank0@step3"])  # a fault is not a link; check_faults checks it
    select.check_shaping(plain, select.choose("process", plain))


@pytest.fixture
def docker_settings(tmp_path, monkeypatch):
    """A configuration of `docker` of the test's own, without a context."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for variable in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def use_context(settings, name, url):
    """As `docker context create` and `docker context use` do."""
    folder = settings / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    endpoints = {"docker": {"Host": url, "SkipTLSVerify": False}}
    (folder / "meta.json").write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints}))
    (settings / "config.json").write_text(json.dumps({"currentContext": name}))


@pytest.mark.parametrize("host", [None, "", "unix:///run/docker.sock"])
def test_containers_of_this_machines_engine_share_its_cores(docker_settings, monkeypatch, host):
    if host is not None:
        monkeypatch.setenv("DOCKER_HOST", host)
    chosen = select.choose("compose", spec())
    assert chosen.needs_machine_lock and "engine at" not in chosen.reason


@pytest.mark.parametrize("by", ["context", "variable"])
def test_containers_of_an_engine_elsewhere_do_not_and_the_reason_says_so(docker_settings, monkeypatch, by):
    if by == "context":
        use_context(docker_settings, "lab", "tcp://127.0.0.9:2375")
    else:
        monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.9:2375")
    chosen = select.choose("compose", spec())
    assert not chosen.needs_machine_lock
    assert "of the engine at tcp://127.0.0.9:2375, whose machine is not locked" in chosen.reason


def test_a_context_of_this_machine_shares_its_cores(docker_settings):
    use_context(docker_settings, "rootless", "unix:///run/user/1000/docker.sock")
    assert select.choose("compose", spec()).needs_machine_lock


def test_an_unknown_substrate_is_refused():
    with pytest.raises(SpecError, match=r"'mars'.*process"):
        select.choose("mars", spec())


def test_the_example_inventory_is_a_valid_one(repository):
    inventory = Inventory.read(repository / "inventory" / "hosts.example.toml")
    assert [node.name for node in inventory.nodes] == ["node0", "node1", "node2", "node3"]


def test_shaping_means_the_same_as_for_docker_compose_up(monkeypatch):
    chosen = select.choose("compose", spec())
    monkeypatch.setenv("SHAPING", "off")
    applied = chosen.drop_unsupported(spec())
    assert not applied.link.shaped and applied.node.cpus == 0.4
    monkeypatch.setenv("SHAPING", "egress")
    assert chosen.drop_unsupported(spec()) == spec()
    monkeypatch.setenv("SHAPING", "some")
    with pytest.raises(SpecError, match="SHAPING 'some'"):
        chosen.drop_unsupported(spec())


@pytest.mark.parametrize("on", ["auto", "netns", "compose"])
def test_a_congestion_control_that_does_not_exist_is_refused_before_a_substrate_is_checked(on, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    for name, found in select.SUBSTRATES.items():
        monkeypatch.setitem(select.SUBSTRATES, name, replace(found, check=lambda plans: pytest.fail("checked")))
    with pytest.raises(
        Unavailable, match=r"^--set node\.congestion='foo': this kernel has no such .* Use one of .*reno"
    ):
        select.select(on, [spec(), spec(node={"congestion": "foo"})])


def test_a_congestion_control_is_not_checked_where_nothing_applies_it(monkeypatch):
    unknown = [spec(node={"congestion": "foo"})]
    assert select.select("process", unknown).name == "process"
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2376")  # an engine with a kernel of its own
    assert select.select("compose", unknown).name == "compose"


def test_auto_accepts_the_default_congestion_control_on_a_kernel_without_it(monkeypatch, tmp_path):
    (tmp_path / "available").write_text("reno")
    monkeypatch.setattr(tcp, "LOADED", tmp_path / "available")
    monkeypatch.setattr(tcp, "_accepted", lambda name: False)
    for name in ("compose", "netns"):
        monkeypatch.setitem(select.SUBSTRATES, name, replace(select.SUBSTRATES[name], check=refusing("not here")))
    assert select.select("auto", [spec()]).name == "process"
    with pytest.raises(Unavailable, match=r"'cubic'.* Use one of reno\.$"):
        select.select("netns", [spec()])
