"""The Compose file is up to date; an engine or an image that is missing is named with the way out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from testbed.control.substrates import engine
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.clone import content_hash
from testbed.control.substrates.compose import idle_override
from testbed.control.substrates.engine import render
from testbed.spec.errors import CommandFailed, EngineLost, SpecError, TestbedError, Unavailable
from testbed.spec.link import Link
from tests.support.scripted_engine import ScriptedEngine, serve

ROOT = Path(__file__).parents[4]


def services(text: str) -> list[str]:
    return re.findall(r"^  (rank\d+):$", text, re.MULTILINE)


def test_compose_yaml_is_up_to_date() -> None:
    assert (ROOT / "compose.yaml").read_text() == render(4), "run: python docker/render.py > compose.yaml"


@pytest.mark.parametrize("nodes", [1, 4, 8])
def test_there_is_one_service_per_rank(nodes: int) -> None:
    text = render(nodes)
    assert services(text) == [f"rank{k}" for k in range(nodes)]
    assert f"NODES: {nodes}\n" in text
    assert text.count("cap_drop") == 1, "one anchor, not copies"


def test_racks_have_a_network_each_and_a_router_between_them_that_may_only_shape() -> None:
    text = render(4, racks=[0, 1, 0, 1])
    networks = re.findall(r"^    networks: \[(.*)\]$", text, re.MULTILINE)
    assert networks == ["rack0", "rack1", "rack0", "rack1", "rack0, rack1"]
    router = text.partition("\n  router:\n")[2].partition("\n\n")[0]
    assert "cap_drop: [ALL]" in router and "cap_add: [NET_ADMIN]" in router and "volumes" not in router
    assert text.count("inhibit_ipv4") == 2 and "  cluster:\n" not in text


def test_an_uplink_that_is_shaped_one_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPING", "egress")
    with pytest.raises(Unavailable, match=r"SHAPING=egress: an uplink is shaped each way\. Use SHAPING=both, or leave"):
        engine.check([NodePlan(name="node0", uplink=Link(rate=20_000_000))])


@pytest.mark.parametrize("nodes", [0, 257])
def test_a_number_of_nodes_out_of_range_is_refused(nodes: int) -> None:
    with pytest.raises(SpecError, match=rf"nodes {nodes}: must be 1 to 256\. Use e\.g\. 4\."):
        render(nodes)


def test_every_variable_is_listed_with_its_default() -> None:
    used = dict(re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", render(4)))
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")]
    listed = {line.partition("=")[0]: line.partition("=")[2].partition("#")[0].strip() for line in lines}
    assert listed == used


def test_no_port_is_published_and_no_socket_mounted() -> None:
    text = render(4)
    assert "ports:" not in text and "docker.sock" not in text and "privileged" not in text


def test_the_image_has_the_pinned_packages() -> None:
    def pins(name: str) -> set[str]:
        return {line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")}

    assert pins("docker/packages.txt") - pins("requirements.txt") == set()


def test_no_engine_is_unavailable_and_has_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/missing.sock")
    with pytest.raises(Unavailable, match=r"no Docker engine answers \(.*missing\.sock: No such file.*`make engine`"):
        engine.engine_version()
    assert engine.projects() == []


def test_the_engine_is_that_of_the_current_docker_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker compose` uses it, so both talk to one engine."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"currentContext": "other"}')
    meta = tmp_path / "contexts/meta" / hashlib.sha256(b"other").hexdigest()
    meta.mkdir(parents=True)
    endpoint = {"Host": f"unix://{tmp_path}/e.sock", "SkipTLSVerify": False}
    (meta / "meta.json").write_text(json.dumps({"Name": "other", "Metadata": {}, "Endpoints": {"docker": endpoint}}))
    with pytest.raises(Unavailable, match=r"e\.sock"):
        engine.engine_version()
    with serve(ScriptedEngine(), tmp_path / "e.sock"):
        assert engine.engine_version() == "28.0"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "image testbed:latest is missing. Build it with"), ("abc", "made from other code (content abc, ")],
)
def test_an_image_of_other_code_is_refused(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = ScriptedEngine()
    with serve(scripted, tmp_path / "e.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        scripted.image = None if content is None else {"testbed.content": content}
        with pytest.raises(Unavailable, match=re.escape(message)):
            engine.inspect_image()
        scripted.image = {"testbed.content": content_hash()}
        assert engine.inspect_image()["Size"] == 7
        assert engine.image_content() == f"up to date, content {content_hash()}"


def test_what_is_gone_already_is_ignored_and_a_refusal_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedEngine()
    scripted.networks["n"] = {"testbed": "compose", "com.docker.compose.project": "p"}
    with serve(scripted, tmp_path / "e.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        answer = scripted.answer
        for status in (404, 409):

            def failing(method: str, *rest: Any, status: int = status) -> tuple[int, Any]:
                return (status, {"message": "in use"}) if method == "DELETE" else answer(method, *rest)

            monkeypatch.setattr(scripted, "answer", failing)
            refused = pytest.raises(TestbedError, match="the Docker engine refused: in use")
            with contextlib.nullcontext() if status == 404 else refused:
                engine.remove_project(engine.Project("p", engine.STOPPED))


def test_a_variable_is_that_of_the_environment_else_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `docker compose up` reads them."""
    text = "# IMAGE=no\nIMAGE=first\nexport IMAGE='mine:1' # the last one counts\nBASE=x#y\nSHAPING=\n"
    (tmp_path / ".env").write_text(text)
    names = ("IMAGE", "BASE", "SHAPING", "MODE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [engine.variable(name, tmp_path) for name in names] == ["mine:1", "x#y", "", ""]
    monkeypatch.setenv("IMAGE", "")
    assert engine.variable("IMAGE", tmp_path) == "", "an empty variable hides the file's"


def test_the_image_is_that_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedEngine()
    scripted.image = None
    monkeypatch.setenv("IMAGE", "mine:1")
    with serve(scripted, tmp_path / "e.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        with pytest.raises(Unavailable, match=r"image mine:1 is missing"):
            engine.inspect_image()
    assert idle_override(1, [])["services"]["rank0"]["image"] == "mine:1"


def test_a_command_that_fails_without_an_engine_says_that_the_engine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(ScriptedEngine(), tmp_path / "e.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        assert engine.run_docker(["echo", "fine"], 10.0) == "fine\n"
        with pytest.raises(CommandFailed, match="false: exit code 1"):
            engine.run_docker(["false"], 10.0)
    with pytest.raises(EngineLost, match="the Docker engine stopped answering"):
        engine.run_docker(["false"], 10.0)
    with pytest.raises(EngineLost) as lost, engine.wrap_docker_errors():
        raise ConnectionError("what the SDK raises")
    assert lost.value.exit_code == 3


@pytest.mark.parametrize(
    ("version", "accepted"), [("2.15.1", False), ("v2.16.0", True), ("2.26.1-4", True), ("5.0", True)]
)
def test_a_compose_that_would_give_all_clones_one_project_is_refused(
    version: str, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho {version}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if accepted:
        assert engine.compose_version() == version
        return
    with pytest.raises(Unavailable, match=rf"Compose {version} is too old\. Install 2\.16 or later"):
        engine.compose_version()


def test_the_file_of_a_controller_needs_no_variable_for_the_name_of_its_project() -> None:
    """Compose refuses a file with ${PWD:?} without PWD, also if --project-name is given."""
    assert "PWD" in render(2) and "PWD" not in render(2, project="testbed-1")
