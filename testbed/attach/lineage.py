"""Find the tensors that a script makes from its gradients: copies, flat buffers, received lists.

`Lineage` sees every operation through torch's dispatcher, which adds some microseconds to each. So it is used for a few
steps only, between the end of backward and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testbed.attach.events import call_site

COMMUNICATION = ("c10d", "_c10d_functional")
# operations that read no value of a tensor
HARMLESS = ("zero_", "_foreach_zero_", "detach", "alias", "view", "_unsafe_view", "t", "transpose", "slice", "split")


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which all views of the tensor share; 0 if the tensor has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class Lineage(TorchDispatchMode):
    """Follows gradients from `open` to `close`.

    `own_call`: context manager for communication that `watch_collectives` (seams.py) would else report a second time.
    """

    def __init__(self, world: int, own_call: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world, self.own_call = world, own_call
        self.active = self.covered = False
        self.kept: list[Tensor] = []  # followed tensors, kept alive so that no other tensor gets their memory
        self.storages: set[int] = set()  # addresses of followed tensors
        self.watched: set[int] = set()  # addresses of gradients and parameters
        self.touched: list[str] = []  # operations that read gradients or parameters
        self.uncovered: list[str] = []  # communication of gradients that the caller does not record (`covering`)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Else torch would import its compiler, which takes seconds, to exempt `__torch_dispatch__`."""
        return False

    def open(self, gradients: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
        """Begin to follow the gradients. Note operations that read the gradients or the parameters."""
        if self.active:
            return
        self.kept = list(gradients)
        self.storages = {storage(tensor) for tensor in self.kept} - {0}
        self.watched = self.storages | {storage(tensor) for tensor in parameters} - {0}
        self.active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop following, and release the tensors."""
        if self.active:
            self.active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.kept.clear()
            self.storages.clear()

    @contextmanager
    def covering(self) -> Iterator[None]:
        """Do not add communication in the `with` block to `uncovered`: the caller records it."""
        self.covered = True
        try:
            yield
        finally:
            self.covered = False

    def is_from_gradients(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if one of the tensors was made from a gradient."""
        return any(storage(tensor) in self.storages for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        name = func._schema.name.partition("::")[2]
        communicates = func.namespace in COMMUNICATION
        if not self.active:
            return func(*args, **kwargs)
        if name not in HARMLESS and len(self.touched) < 10 and any(storage(each) in self.watched for each in inputs):
            self.touched.append(f"{name} at {call_site()}")
        sources = [each for each in inputs if storage(each) in self.storages]
        if not communicates:
            result = func(*args, **kwargs)
            if sources and "norm" not in name:
                least = min(each.numel() for each in sources)
                self._add(
                    each
                    for each in tree_leaves(result)
                    if isinstance(each, Tensor) and each.numel() * self.world >= least
                )
            return result
        with self.own_call():
            result = func(*args, **kwargs)
        if sources:
            self._add(inputs)
            if not self.covered:
                self.uncovered.append(f"{name.strip('_')} at {call_site()}")
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            address = storage(tensor)
            if address and address not in self.storages:
                self.storages.add(address)
                self.kept.append(tensor)
