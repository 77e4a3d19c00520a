"""`testbed exec --requirements FILE`: an image with a script's packages, as a layer on ours.

This machine downloads the packages as wheels (docker/wheels.sh); pip uses its own configuration. The build has no
network. Wheels and image are kept, by the content of the file, of our packages and of our image; `testbed clean`
removes images that a newer one has replaced, `testbed clean --all` all of them and the wheels.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.control.machine.processes import run
from testbed.control.substrates.clone import ROOT, content_hash
from testbed.control.substrates.engine import connect, image_name, inspect_image, wrap_docker_errors
from testbed.results.folder import read_bounded
from testbed.spec.errors import CommandFailed, Unavailable, one_line, refuse

REPOSITORY = "testbed-requirements"
LAYER_LABEL = "testbed.layer"  # on the image: the hash of what it was made from
MAX_REQUIREMENTS_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 3600.0
BUILD_TIMEOUT_S = 1800.0
REMOVE_TIMEOUT_S = 120.0
PIP = "python3 /layer/wheels/pip.whl/pip install --quiet --no-cache-dir --no-index --find-links /layer/wheels"
DOCKERFILE = f"""\
ARG BASE
FROM ${{BASE}}
RUN --mount=type=bind,target=/layer {PIP} \\
    --break-system-packages --root-user-action=ignore --no-compile --requirement /layer/requirements.txt
"""


def image_with(requirements: Path, progress: Callable[[str], None]) -> str:
    """Return the name of the image with these packages; build it, unless it is up to date.

    Raises UsageError if pip cannot get or install them.
    """
    content = read_bounded(requirements, MAX_REQUIREMENTS_BYTES)
    inspect_image()
    name = f"{REPOSITORY}:{_hash(content)}"
    key = _hash(content, content_hash().encode(), DOCKERFILE.encode())
    if _layer_of(name) == key:
        progress(f"{requirements}: the image {name} is up to date")
        return name
    wheels = _wheels(requirements, content, progress)
    progress(f"{requirements}: installing {len(list(wheels.glob('*.whl'))) - 1} wheels in the image {name}")
    with tempfile.TemporaryDirectory(prefix="testbed-layer-") as scratch:
        context = Path(scratch)
        (context / "Dockerfile").write_text(DOCKERFILE)
        (context / "requirements.txt").write_bytes(content)
        shutil.copytree(wheels, context / "wheels", copy_function=_link_or_copy)
        labels = ["--label", f"{LAYER_LABEL}={key}"]
        argv = ["docker", "build", "--quiet", "--network", "none", "--build-arg", f"BASE={image_name()}", *labels]
        with _pip_errors(requirements, "installed in the image"):
            run([*argv, "--tag", name, str(context)], BUILD_TIMEOUT_S)
    return name


@dataclass(frozen=True)
class Kept:
    """An image with packages of a script, or a folder with their wheels."""

    kind: str  # "image" or "folder"
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def why(self) -> str:
        """Say what it is for."""
        return "it has packages of a script, and --requirements makes it again"

    def remove(self) -> None:
        """Remove it. An image that a container uses stays."""
        if self.kind == "folder":
            shutil.rmtree(self.name, ignore_errors=True)
        else:
            with contextlib.suppress(CommandFailed):
                run(["docker", "image", "rm", self.name], REMOVE_TIMEOUT_S)


def kept_layers(everything: bool) -> list[Kept]:
    """The images that a newer one has replaced; with `everything` all that no container uses, and the wheels."""
    found = [Kept("folder", str(path)) for path in sorted(cache_dir().glob("wheels-*"))] if everything else []
    try:
        client = connect()
    except Unavailable:
        return found
    with contextlib.closing(client), wrap_docker_errors():
        for image in client.images.list(filters={"label": LAYER_LABEL}):
            names = [name for name in image.tags if name.startswith(f"{REPOSITORY}:")] if everything else []
            names = names if image.tags else [str(image.id)]
            if not client.containers.list(all=True, filters={"ancestor": image.id}, sparse=True):
                found += [Kept("image", name) for name in names]
    return found


def _layer_of(name: str) -> str:
    """The label of an image that was built before; empty if there is none."""
    with contextlib.closing(connect()) as client, wrap_docker_errors():
        from docker.errors import ImageNotFound

        with contextlib.suppress(ImageNotFound):
            return str(client.images.get(name).labels.get(LAYER_LABEL, ""))
    return ""


def _wheels(requirements: Path, content: bytes, progress: Callable[[str], None]) -> Path:
    """The folder with the wheels of these requirements, downloaded once."""
    packages = ROOT / "docker" / "packages.txt"
    folder = cache_dir() / f"wheels-{_hash(content, packages.read_bytes())}"
    if folder.is_dir():
        return folder
    progress(f"{requirements}: downloading wheels for the image's Python")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".wheels-", dir=cache_dir())
    except OSError as error:
        raise Unavailable(f"{cache_dir()}: cannot be written ({error.strerror}). Set XDG_CACHE_HOME.") from None
    with scratch as place, _pip_errors(requirements, "downloaded"):
        staged = Path(place) / "new"
        argv = [str(ROOT / "docker" / "wheels.sh"), str(requirements.resolve()), str(staged)]
        run(["env", f"PYTHON={sys.executable}", *argv], DOWNLOAD_TIMEOUT_S)
        staged.rename(folder)
    return folder


def cache_dir() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "testbed"


@contextlib.contextmanager
def _pip_errors(requirements: Path, what: str) -> Iterator[None]:
    """Raise UsageError with pip's own sentence instead of its whole output."""
    try:
        yield
    except CommandFailed as error:
        reason = pip_error(error.output.splitlines()) or one_line(str(error))[-300:]
        way_out = "Change the file; for packages without wheels build an image FROM testbed and use --image."
        raise refuse("--requirements", str(requirements), f"cannot be {what} ({reason})", way_out) from None


def pip_error(lines: Sequence[str]) -> str:
    """The sentence of pip that says most: a conflict with the image's own packages, or the last error."""
    errors = [line.partition("ERROR:")[2].strip() for line in lines if "ERROR:" in line]
    conflicts = [each for each in errors if each.startswith("Cannot install")]
    if conflicts:
        return one_line(
            f"{conflicts[0].partition(' because')[0]} beside the packages of the image, which keep their versions"
        )
    return one_line("".join(errors[-1:]))[:300]


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
