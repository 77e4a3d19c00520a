"""Let torchvision in an observed script be imported, and find its data sets without the internet.

The launcher provides data sets in torchvision's layout (data/layouts.py). `datasets.CIFAR10(root, download=True)` finds
them at any root: instead of a download, a link to the provided folder is made there. torchvision compares the MD5 of
the published CIFAR-10 files. Files in a provided folder are verified by the SHA-256 of their images and labels instead.

This module imports the standard library and events.py only. A Python with torchvision also has torch and numpy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from testbed.attach.events import note_once

CIFAR, MNIST, OPERATORS = "torchvision.datasets.cifar", "torchvision.datasets.mnist", "torchvision._meta_registrations"
CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_TEST = ("test_batch",)


class Vision:
    """Changes modules of torchvision when they are imported. `offered`: the folder and the digests of each data set."""

    def __init__(
        self, offered: Mapping[str, Any], changed: list[str], failed: Callable[[str, BaseException], None]
    ) -> None:
        self.offered, self.changed, self.failed = offered, changed, failed
        self._verified: dict[str, bool] = {}
        self._moved: dict[tuple[str, str], str] = {}  # (data set, root without a link) -> root of the testbed's copy
        self._kept: list[Any] = []

    def install(self) -> None:
        """Install a finder that changes torchvision's modules when they are imported."""
        acts = {OPERATORS: self._declare_operators}
        acts |= {CIFAR: self._serve_cifar} if "cifar10" in self.offered else {}
        acts |= {MNIST: self._serve_mnist} if "mnist" in self.offered else {}
        sys.meta_path.insert(0, _Finder(acts, self.failed))

    def note(self, sentence: str) -> None:
        """Append to `changed` a sentence on what was changed for the script, once."""
        note_once(self.changed, sentence)

    def _declare_operators(self, module: Any, load: Callable[[Any], None]) -> None:
        """Load the module. If two operators are missing (a CUDA build beside a CPU build of torch), declare them."""
        try:
            load(module)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            import torch

            library = torch.library.Library("torchvision", "DEF")
            self._kept.append(library)  # torch removes the schemas with this object
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            load(module)
            self.note("torchvision's compiled operators do not fit this torch; two of them are declared without code")

    def _serve_cifar(self, module: Any, load: Callable[[Any], None]) -> None:
        load(module)
        kind, check, source = module.CIFAR10, module.check_integrity, self.offered["cifar10"]
        base = str(kind.base_folder)
        ours = os.path.realpath(os.path.join(source["root"], base))

        def check_integrity(path: Any, md5: str | None = None) -> bool:
            if os.path.realpath(os.path.dirname(path)) != ours:
                return bool(check(path, md5))
            return os.path.isfile(path) and self._is_verified(ours, source["digests"])

        module.check_integrity = check_integrity

        def present(data: Any) -> bool:
            return data.base_folder != base or bool(data._check_integrity())

        self._link_instead_of_download(kind, base, source["root"], present)
        self._wrap(kind, base, lambda data: os.path.join(data.root, data.base_folder), ours, "CIFAR-10")

    def _serve_mnist(self, module: Any, load: Callable[[Any], None]) -> None:
        load(module)
        kind, source = module.MNIST, self.offered["mnist"]
        base = os.path.join("MNIST", "raw")
        ours = os.path.realpath(os.path.join(source["root"], base))

        def present(data: Any) -> bool:  # FashionMNIST and others are subclasses of MNIST with other files
            return type(data).__name__ != "MNIST" or data._check_exists()

        self._link_instead_of_download(kind, base, source["root"], present)
        self._wrap(kind, base, lambda data: data.raw_folder, ours, "MNIST")

    def _link_instead_of_download(self, kind: Any, base: str, root: str, present: Callable[[Any], bool]) -> None:
        original = kind.download

        @functools.wraps(original)
        def download(data: Any) -> Any:
            try:
                if not present(data):
                    asked = os.path.expanduser(data.root)
                    data.root = link(asked, base, root)
                    if data.root != asked:
                        self._moved[base, asked] = data.root
            except Exception as error:
                self.failed("torchvision's download", error)
            return original(data)

        kind.download = download

    def _wrap(self, kind: Any, base: str, folder: Callable[[Any], str], ours: str, name: str) -> None:
        """Note that the data set is the testbed's copy. Replace a root without a link by the root of the copy."""
        original = kind.__init__

        def moved(root: Any) -> Any:
            return self._moved.get((base, os.path.expanduser(root)), root) if isinstance(root, str) else root

        @functools.wraps(original)
        def construct(data: Any, *arguments: Any, **named: Any) -> None:
            if "root" in named:
                named["root"] = moved(named["root"])
            original(data, *map(moved, arguments[:1]), *arguments[1:], **named)
            if os.path.realpath(folder(data)) == ours:
                check = "SHA-256 of its images and labels instead of torchvision's MD5 of its files"
                self.note(f"{name} was not downloaded: it is the testbed's own copy, verified by {check}")

        kind.__init__ = construct

    def _is_verified(self, folder: str, digests: Mapping[str, str]) -> bool:
        if folder not in self._verified:
            self._verified[folder] = cifar_digests(folder) == dict(digests)
        return self._verified[folder]


def link(root: str, base: str, source: str) -> str:
    """Make `root/base` a link to `source/base`. Return the root that has the files: `source` if that fails."""
    target = os.path.join(root, base)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.path.join(source, base), target)
    except OSError:
        return root if os.path.isdir(target) and os.listdir(target) else source
    return root


def cifar_digests(folder: str) -> dict[str, str]:
    """Return the SHA-256 of images (N x 32 x 32 x 3) and labels, with the keys of spec/datasets.py."""
    import pickle

    import numpy as np

    found: dict[str, str] = {}
    for part, files in (("train", CIFAR_TRAIN), ("test", CIFAR_TEST)):
        images, labels = hashlib.sha256(), hashlib.sha256()
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                content = pickle.load(file, encoding="latin1")  # safe: the testbed itself has written this file
            images.update(np.ascontiguousarray(content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)).data)
            labels.update(bytes(content["labels"]))
        found |= {f"{part}_images": images.hexdigest(), f"{part}_labels": labels.hexdigest()}
    return found


class _Finder(importlib.abc.MetaPathFinder):
    """Lets a function of `acts` load a module instead of the module's loader. It finds no module itself."""

    def __init__(self, acts: dict[str, Callable[..., None]], failed: Callable[[str, BaseException], None]) -> None:
        self.acts, self.failed = acts, failed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        act = self.acts.pop(name, None)
        if act is None:
            return None
        spec = importlib.util.find_spec(name)  # found by the other finders
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            loaded = []

            def load_once(module: Any) -> None:
                load(module)
                loaded.append(module)

            try:
                act(module, load_once)
            except Exception as error:
                if not loaded:
                    raise  # the module itself failed to load
                self.failed(name, error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
