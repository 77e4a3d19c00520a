"""docker/torch.sh takes torch and torchvision, and nothing else, from an index of CPU builds, and does without it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker/torch.sh"
PINS = "# one tested pair\ntorch==2.13.0\ntorchvision==0.28.0\nnumpy==2.4.6\n"
CPU_BUILDS = ("torch-2.13.0+cpu", "torchvision-0.28.0+cpu", "numpy-2.4.6+cpu")
CHECK_S = 3.0
MARGIN_S = 30.0  # to start a shell, Python and pip on a busy machine; pip itself would retry for longer


class Index:
    """A package index on loopback (PEP 503) and the paths that were requested from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, []
        handler = type(
            "Handler", (SimpleHTTPRequestHandler,), {"log_request": lambda each, *_: self.paths.append(each.path)}
        )
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def projects(self) -> set[str]:
        return {path.split("/")[1] for path in self.paths}

    def add(self, release: str, requires: Sequence[str] = ()) -> None:
        """A wheel that holds its metadata and nothing else."""
        name, version = release.split("-")
        page = self.folder / name
        page.mkdir(parents=True)
        info = f"{name}-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        with zipfile.ZipFile(page / f"{release}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        (page / "index.html").write_text(f'<a href="{release}-py3-none-any.whl">{release}</a>')


@contextmanager
def serving(folder: Path) -> Iterator[Index]:
    index = Index(folder)
    thread = threading.Thread(target=index.server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        index.server.shutdown()
        index.server.server_close()
        thread.join()


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[Index]:
    with serving(tmp_path / "cpu-index") as index:
        for release in CPU_BUILDS:
            index.add(release, requires=["sympy"] if release.startswith("torch-") else [])
        yield index


@pytest.fixture
def usual_index(tmp_path: Path) -> Iterator[Index]:
    with serving(tmp_path / "usual-index") as index:
        index.add("torch-2.13.0", requires=["nvidia-cublas"])
        for release in ("torchvision-0.28.0", "numpy-2.4.6", "sympy-1.14.0", "nvidia_cublas-13.0"):
            index.add(release)
        (index.folder / "nvidia_cublas").rename(index.folder / "nvidia-cublas")
        yield index


def environment(**more: str) -> dict[str, str]:
    """This machine's, without its own settings of pip and without a proxy for loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_INDEX"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "no_proxy": "127.0.0.1"} | more


def take(tmp_path: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return what the script prints, and the wheels that it downloads."""
    pins, dest = tmp_path / "pins.txt", tmp_path / "taken"
    pins.write_text(PINS)
    dest.mkdir()
    argv = [SCRIPT, pins, sys.executable, "download", "--quiet", "--dest", dest]
    done = subprocess.run(argv, env=environment(**env), capture_output=True, text=True, timeout=60, check=False)
    return done, sorted(path.name.removesuffix("-py3-none-any.whl") for path in dest.iterdir())


def test_an_index_that_answers_gives_both_packages_and_gets_no_other_request(tmp_path: Path, cpu_index: Index) -> None:
    done, taken = take(tmp_path, TORCH_INDEX=cpu_index.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert taken == ["torch-2.13.0+cpu", "torchvision-0.28.0+cpu"]
    assert cpu_index.projects == {"torch", "torchvision"}, "neither sympy, which torch requires, nor numpy"


def test_a_closed_port_is_passed_over_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, and nobody listens
        begun = time.monotonic()
        done, taken = take(tmp_path, TORCH_INDEX=f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (done.returncode, taken) == (0, [])
    assert "does not answer" in done.stderr and "Connection refused" in done.stderr
    assert time.monotonic() - begun < MARGIN_S


def test_an_index_that_stays_silent_costs_three_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        done, taken = take(tmp_path, TORCH_INDEX=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (done.returncode, taken) == (0, [])
    assert "does not answer (nothing within 3 s). pip's own index is used" in done.stderr
    assert CHECK_S - 0.1 < time.monotonic() - begun < CHECK_S + MARGIN_S


def test_an_index_without_torch_is_passed_over(tmp_path: Path) -> None:
    with serving(tmp_path / "empty") as index:
        (tmp_path / "empty").mkdir()
        done, taken = take(tmp_path, TORCH_INDEX=index.url)
    assert (done.returncode, taken) == (0, [])
    assert "does not answer (HTTP Error 404" in done.stderr


def test_an_index_that_has_other_versions_fails_with_the_way_out(tmp_path: Path) -> None:
    with serving(tmp_path / "old") as index:
        index.add("torch-2.12.0")
        done, taken = take(tmp_path, TORCH_INDEX=index.url)
    assert (done.returncode, taken) == (2, [])
    assert "pip cannot take torch==2.13.0 torchvision==0.28.0 from it" in done.stderr
    assert "leave it out with TORCH_INDEX= (empty)" in done.stderr


def test_an_empty_variable_switches_it_off(tmp_path: Path) -> None:
    done, taken = take(tmp_path, TORCH_INDEX="")
    assert (done.returncode, taken, done.stdout, done.stderr) == (0, [], "", "")


def make_wheelhouse(tmp_path: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """docker/wheels.sh in a folder of its own."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "wheels").mkdir()
    for name in ("wheels.sh", "torch.sh"):
        shutil.copy(ROOT / "docker" / name, tmp_path / "docker")
    (tmp_path / "docker/packages.txt").write_text(PINS + "sympy==1.14.0\n")
    done = subprocess.run(
        [tmp_path / "docker/wheels.sh"],
        env=environment(PYTHON=sys.executable, **env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, sorted(path.name.removesuffix("-py3-none-any.whl") for path in tmp_path.glob("wheels/**/*.whl"))


def test_the_wheelhouse_has_the_cpu_builds_and_the_rest_from_the_usual_index(
    tmp_path: Path, cpu_index: Index, usual_index: Index
) -> None:
    done, wheels = make_wheelhouse(tmp_path, TORCH_INDEX=cpu_index.url, PIP_INDEX_URL=usual_index.url)
    assert done.returncode == 0, done.stderr
    assert wheels == ["numpy-2.4.6", "sympy-1.14.0", "torch-2.13.0+cpu", "torchvision-0.28.0+cpu"]
    assert cpu_index.projects == {"torch", "torchvision"}
    assert "nvidia-cublas" not in usual_index.projects


def test_the_wheelhouse_refuses_cuda_where_only_the_usual_index_answers(tmp_path: Path, usual_index: Index) -> None:
    done, wheels = make_wheelhouse(tmp_path, TORCH_INDEX="", PIP_INDEX_URL=usual_index.url)
    assert (done.returncode, wheels) == (2, [])
    assert "a CUDA build of torch only. Set TORCH_INDEX" in done.stderr


def test_make_asks_the_index_before_it_installs_the_rest() -> None:
    argv = ["make", "--dry-run", "--always-make", "venv"]
    recipe = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    first, rest = recipe.find("docker/torch.sh requirements.txt .venv/bin/python"), recipe.find("--requirement")
    assert 0 <= first < rest, recipe


def test_compose_names_the_index_that_the_script_names() -> None:
    """With a dash alone: an empty TORCH_INDEX stays empty there too."""
    default = re.search(r"\$\{TORCH_INDEX-(.+)\}", SCRIPT.read_text())
    assert default and f"TORCH_INDEX: ${{TORCH_INDEX-{default[1]}}}\n" in (ROOT / "compose.yaml").read_text()


@pytest.mark.parametrize("pins", ["requirements.txt", "docker/packages.txt"])
def test_both_lists_pin_the_pair(pins: str) -> None:
    lines = [line for line in (ROOT / pins).read_text().splitlines() if line.startswith("torch")]
    assert [line.partition("==")[0] for line in lines] == ["torch", "torchvision"]
