"""The Compose file: compose.yaml is up to date, and .env.example lists its variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.control.substrates.engine import render
from testbed.spec.errors import SpecError

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
