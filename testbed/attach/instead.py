"""`--instead MODE`: the user's script keeps its loop, and one of our modes synchronises its gradients.

    steps 0 to 3   the script synchronises. Samples of the gradients show whether the optimizer gets their mean, and
                   lineage.py shows which of the script's collectives carry gradients. Anything else is refused.
    step 4         our mode averages at the end of backward. The script's own collectives on gradients still run, on
                   inputs that are now equal, and their effect is measured: a factor.
    from step 5    each of these collectives is replaced by its closed form on equal inputs, so that the script's own
                   arithmetic around it stays right: all_reduce times N, gather N copies, scatter and broadcast its own.

In steps 4 and 5 the gradients are compared with the mean again. With DDP there is no such collective: its own reduction
is switched off. All other collectives of the script (metrics, barriers, start values) run as before. A refusal is the
same on all ranks and ends the script with exit code 2.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from testbed.attach.events import Collective, Hub, Part, call_site
from testbed.attach.lineage import Lineage, storage
from testbed.spec.errors import SpecError, UsageError

SAMPLES = 64  # numbers of a parameter's gradient that are compared
TOLERANCE = 1e-3  # of factor and residual of the optimizer's gradients against the mean
REPLACED = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather")


class Instead(Part):
    """Replaces the synchronisation of a script. `request`: a RunSpec as JSON; `timeline`: that of the steps."""

    essential = True  # a script whose gradients are not synchronised must not go on

    def __init__(
        self,
        hub: Hub,
        send: Callable[[dict[str, Any]], None],
        request: dict[str, Any],
        first: int,
        timeline: Callable[[], Any],
        replaces: Part,
    ) -> None:
        self.hub, self.send, self.request, self.timeline = hub, send, request, timeline
        self.first = first  # the first step that the mode synchronises
        self.replaces = replaces  # the part that samples what the script does: it ends with the swap
        self.mode = str(request["mode"])
        self.deadline = float(request.get("deadline") or 300.0)
        self.thread = threading.get_ident()
        self.inside = 0  # depth of calls of our own in the script's thread
        self.step = self.passes = 0
        self.wrappers: list[Any] = []  # DDP modules
        self.optimizer: Any = None
        self.parameters: list[Any] = []
        self.called: list[Any] = []  # modules in the order of their first forward
        self.hooks: list[Any] = []
        self.lineage: Lineage | None = None
        self.window = False  # between the end of the last backward and the optimizer's step
        self.calls: list[list[dict[str, Any]]] = []  # collectives in that window, one list a step
        self.local: dict[int, Tensor] = {}
        self.given: list[Tensor] | None = None
        self.passes_seen: set[int] = set()
        self.without: set[int] | None = None  # parameters that got no gradient, by their number
        self.fits: list[tuple[float, float]] = []  # factor and residual
        self.sync: Any = None
        self.begun = self.synced = False
        self.gradient_sites: set[tuple[str, str]] = set()
        self.other_sites: set[tuple[str, str]] = set()
        self.sizes: dict[tuple[str, str], set[int]] = {}
        self.factors: dict[tuple[str, str], float] = {}
        self.sent_last: dict[int, Tensor] = {}  # the last gradient that was gathered or reduced, by its length
        hub.muted = self.is_ours
        hub.parts.insert(0, EndOfWindow(self._close_window))
        self._replace_collectives()
        self._replace_clipping()

    @property
    def swapped(self) -> bool:
        return self.sync is not None

    def is_ours(self) -> bool:
        """True if the present call is the mode's own communication, not the script's."""
        return self.inside > 0 or (self.swapped and threading.get_ident() != self.thread)

    # --- events of the script ----------------------------------------------------------------------------------------

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        if kind == "DistributedDataParallel":
            self.wrappers.append(module)

    def backward_began(self, loss: Any) -> None:
        self.passes += 1
        with self._guarded():
            if self.sync is not None:
                self._before_backward()

    def backward_ended(self, reduced: list[Collective]) -> None:
        with self._guarded():
            if self.sync is not None:
                self._after_backward()
            elif self.optimizer is not None and self.step < self.first:
                self.calls.append([]) if self.passes == 1 else None
                self._open_window(gradients=True)
        self.window = True

    def update_began(self, optimizer: Any) -> None:
        with self._guarded():
            if self.optimizer is None:
                self._begin(optimizer)
            elif optimizer is not self.optimizer:
                raise self._refusal("the script has more than one optimizer", "Use a script with one.")
            else:
                self._before_update()
        self.window = False

    def update_ended(self, optimizer: Any) -> None:
        with self._guarded():
            self.step += 1
            self.passes, self.given, self.begun, self.synced = 0, None, False, False
            self.local.clear()
            if self.step == self.first:
                self._swap()
            elif not self.swapped and self.pipelined:
                self._open_window(gradients=False)
            elif self.swapped:
                self.sync.verify()

    def ends(self) -> None:
        self._finish()

    # --- before the swap: what the script does ------------------------------------------------------------------------

    @property
    def pipelined(self) -> bool:
        return "/pipeline" in self.mode

    def _begin(self, optimizer: Any) -> None:
        """The first step: the parameters are known from now on."""
        self.optimizer = optimizer
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise self._refusal("the script has no process group of several ranks", "Use a script that synchronises.")
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(hasattr(p, "to_local") for p in self.parameters):
            raise self._refusal("its parameters are sharded (FSDP), and modes average whole gradients", "Use DDP.")
        if len({p.dtype for p in self.parameters}) > 1:
            raise self._refusal("its parameters have several dtypes", "Use one.")
        for wrapper in self.wrappers:
            if getattr(wrapper, "static_graph", False):
                raise self._refusal(
                    "DDP has static_graph=True, and its reduction cannot be switched off", "Leave it out."
                )
        for number, parameter in enumerate(self.parameters):
            hook = functools.partial(self._sample, number)
            self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self.hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(self._forward_begins))
        self.lineage = Lineage(dist.get_world_size(), self._own_call)

    def _sample(self, number: int, parameter: Any) -> None:
        """A gradient was accumulated: keep some numbers of it."""
        self.local[number] = sample(parameter.grad)

    def _forward_begins(self, module: Any, inputs: Any) -> None:
        self._close_window()
        if module not in self.called:
            self.called.append(module)

    def _open_window(self, gradients: bool) -> None:
        if self.lineage is not None and self.step < self.first:
            made = [p.grad for p in self.parameters if p.grad is not None] if gradients else []
            self.lineage.open(made, self.parameters)

    def _close_window(self) -> None:
        if self.lineage is not None:
            self.lineage.close()

    def _before_update(self) -> None:
        if not self.passes:
            raise self._refusal(
                "it computes gradients inside optimizer.step (a closure)", "Use a script without a closure."
            )
        if self.swapped and not self.synced:  # fewer passes than usual, e.g. at the end of an epoch
            self._synchronise()
        if self.swapped and self.pipelined:
            self.update.check_settings()
            for parameter in self.parameters:
                parameter.grad = None  # the update of this step was made shard by shard
        if self.step < self.first:
            without = {number for number, p in enumerate(self.parameters) if p.grad is None}
            if self.without not in (None, without):
                raise self._refusal(
                    "some parameters get a gradient in some steps only", "Use all parameters in every step."
                )
            self.without = without
            self.passes_seen.add(self.passes)
        if self.step < self.first or (self.step < self.first + 2 and self._comparable):
            self._compare()

    @property
    def _comparable(self) -> bool:
        """True if the mode must give the mean to the optimizer, up to rounding."""
        return not self.pipelined and self.sync.mode.codec is None

    def _compare(self) -> None:
        """Compare what the optimizer gets with the mean over all ranks. Raises SpecError on all ranks alike."""
        numbers = [k for k, p in enumerate(self.parameters) if p.grad is not None]
        given = self.given or [sample(self.parameters[k].grad) for k in numbers]
        missing = [k for k in numbers if k not in self.local]
        local = [self.local.get(k, torch.zeros(0)) for k in numbers]
        row = torch.cat([*local, *given]).double() if numbers and not missing else torch.zeros(0, dtype=torch.float64)
        lengths = self._gather(torch.tensor([len(row)]))
        if len({int(each) for each in lengths}) > 1 or not len(row):
            rule = "the gradients of its parameters are not the same ones on all ranks, or there are none"
            raise self._refusal(rule, "Use a script in which every rank trains the same parameters.")
        rows = torch.stack(self._gather(row))
        locals_, givens = rows.split(rows.shape[1] // 2, dim=1)
        factor, residual = fit_to_mean(locals_, givens)
        if self.step < self.first:
            self.fits.append((factor, residual))
        if not (abs(factor - 1) <= TOLERANCE and residual <= TOLERANCE):
            raise self._refusal(*self._not_the_mean(locals_, givens, factor, residual))

    def _not_the_mean(self, locals_: Tensor, givens: Tensor, factor: float, residual: float) -> tuple[str, str]:
        n = len(locals_)
        lines = ", ".join(
            dict.fromkeys(f"{c['operation']} at {c['site']}" for s in self.calls for c in s if c["tainted"])
        )
        seen = f"step {self.step}, factor {factor:.4g}, residual {residual:.2g}" + (f", {lines}" if lines else "")
        if self.swapped:
            rule = f"with the mode in place its gradients are no longer the mean of all ranks ({seen})"
            return rule, "The script changes gradients in a way that cannot be followed. Edit it for the mode."
        if not float(locals_.abs().max()) > 0:
            return f"its gradients are all zero or not a number ({seen})", "Mend the script first."
        if fits(givens, locals_):
            return f"its gradients are not synchronised: each rank updates with its own ({seen})", "Average them first."
        if residual <= TOLERANCE:
            word = f", the sum is not divided by {n}" if abs(factor - n) < TOLERANCE * n else ""
            word = f", divided by {n} twice" if abs(factor * n - 1) < TOLERANCE else word
            rule = f"its gradients are {factor:.4g} times the mean of all ranks{word} ({seen})"
            return rule, "Mend it first: a mode gives the plain mean."
        return f"its gradients are not the mean of all ranks ({seen})", "A mode gives the plain mean."

    # --- the swap -----------------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        assert self.lineage is not None
        for hook in self.hooks:
            hook.remove()
        if len(self.passes_seen) > 1:
            seen = " and ".join(str(each) for each in sorted(self.passes_seen))
            raise self._refusal(f"its steps have {seen} backward passes", "Use as many in every step.")
        self.usual_passes = self.passes_seen.pop()
        self._agree_on_sites()
        self._check_pipeline()
        self._build()
        if self.replaces in self.hub.parts:
            self.hub.parts.remove(self.replaces)
        detail = {
            "factor": self.fits[-1][0],
            "residual": max(residual for _, residual in self.fits),
            "passes": self.usual_passes,
            "replaced": sorted(f"{operation} at {site}" for operation, site in self.gradient_sites),
            "ddp": bool(self.wrappers),
        }
        self.send({"kind": "swap", "step": self.step, "mode": self.mode, "detail": detail})

    def _agree_on_sites(self) -> None:
        """Decide which collectives of the script carry gradients: the k-th of a step is the same one on all ranks."""
        mine = [[(c["operation"], c["tainted"], c["whole"]) for c in step] for step in self.calls]
        everyone: list[Any] = [None] * dist.get_world_size()
        with self._own_call():
            dist.all_gather_object(everyone, (mine, self.lineage.uncovered if self.lineage else []))
        for _, uncovered in everyone:
            if uncovered:
                rule = f"its gradients go through {uncovered[0]}, which has no closed form here"
                raise self._refusal(rule, f"Replaced are {', '.join(REPLACED)}, and DDP.")
        for number, step in enumerate(self.calls):
            rows = [ranks[number] for ranks, _ in everyone if number < len(ranks)]
            for place, call in enumerate(step):
                same = [row[place] for row in rows if place < len(row) and row[place][0] == call["operation"]]
                if any(tainted for _, tainted, _ in same):
                    if len(same) < len(everyone) or not all(whole for _, _, whole in same):
                        rule = f"{call['operation']} at {call['site']} has gradients, and not all ranks take part in it"
                        raise self._refusal(rule, "Use collectives of all ranks.")
                    self.gradient_sites.add((call["operation"], call["site"]))
                    self.sizes.setdefault((call["operation"], call["site"]), set()).add(call["numel"])
                else:
                    self.other_sites.add((call["operation"], call["site"]))
        if not self.wrappers and not self.gradient_sites:
            rule = "no collective on gradients was seen, and there is no DDP"
            raise self._refusal(rule, "Use a script that synchronises its gradients after backward.")

    def _check_pipeline(self) -> None:
        if not self.pipelined:
            return
        assert self.lineage is not None
        everyone: list[Any] = [None] * dist.get_world_size()
        with self._own_call():
            dist.all_gather_object(everyone, self.lineage.touched)
        touched = next((each for each in everyone if each), None)
        if touched:
            rule = "a pipeline changes gradients and parameters from backward to the next forward"
            raise self._refusal(f"{rule}, and {touched[0]} reads them", "Use overlap instead of pipeline.")
        if self.without:
            raise self._refusal("pipeline: some parameters get no gradient", "Use overlap instead of pipeline.")

    def _build(self) -> None:
        """Load the mode and attach it to the model."""
        try:
            from testbed.attach.takeover import ScriptUpdate, parameters_module, switch_off
            from testbed.rank.group import Group
            from testbed.rank.sync.check import check_mode
            from testbed.rank.sync.schedules import build
            from testbed.results.timeline import Timeline
            from testbed.spec.run import RunSpec
        except ImportError as error:
            rule = f"the script's Python {sys.executable} lacks a package of the testbed ({error.name})"
            raise self._refusal(rule, f"Install it there: {sys.executable} -m pip install pydantic.") from None
        spec = RunSpec.load(self.request, where="")
        trained = [p for number, p in enumerate(self.parameters) if number not in (self.without or set())]
        root = self._root(trained)
        self.reference = spec.mode.is_reference
        if (self.pipelined or self.reference) and root is None:
            raise self._refusal(f"{spec.mode}: no module of the script has all its parameters", "Use overlap.")
        model = root if self.pipelined or self.reference else parameters_module(ordered(root, trained))
        store = dist.PrefixStore("testbed/instead", distributed_c10d._get_default_store())
        group = Group(dist.get_rank(), dist.get_world_size(), store, self.deadline)
        for wrapper in self.wrappers:
            switch_off(wrapper)
        self.update = ScriptUpdate(self.optimizer)
        with self._own_call():
            check_mode(spec, model, group)
            timeline = Timeline(detailed=False) if self.reference else self.timeline()
            sync = build(spec.mode, spec.placement, group, timeline, spec.seed)
            before = {id(p): p.grad for p in trained}
            self.views: dict[int, Tensor] = {}
            if not self.pipelined:  # before the mode's own hooks, which launch buckets
                for number, parameter in enumerate(self.parameters):
                    parameter.register_post_accumulate_grad_hook(functools.partial(self._place, number))
            module = sync.attach(model, self.update)
            if self.pipelined:
                model.register_forward_pre_hook(self._begin_step)
            elif self.reference:
                self._through(module, model)
            else:
                self.views = {id(p): p.grad for p in trained if p.grad is not None}
                for parameter in trained:
                    if before[id(parameter)] is not None:
                        self.views[id(parameter)].copy_(before[id(parameter)])
        self.trained = trained
        self.sync = sync
        self._wait_before_reads()

    def _root(self, trained: list[Any]) -> Any:
        """The outermost module that has all trained parameters and is called in forward; None if there is none."""
        ids = {id(p) for p in trained}
        for module in self.called:
            inner = module.module if module in self.wrappers else module
            if ids <= {id(p) for p in inner.parameters()}:
                return inner
        return None

    def _through(self, module: Any, model: Any) -> None:
        """Have the script's calls of its model go through DDP."""
        original, nested = model.forward, False

        @functools.wraps(original)
        def forward(*inputs: Any, **named: Any) -> Any:
            nonlocal nested
            if nested:
                return original(*inputs, **named)
            nested = True
            try:
                module.require_backward_grad_sync = self.passes + 1 >= self.usual_passes
                return module(*inputs, **named)
            finally:
                nested = False

        model.forward = forward

    def _wait_before_reads(self) -> None:
        """Before the script reads parameters, or leaves the group, the mode finishes."""
        leave = distributed_c10d.destroy_process_group

        @functools.wraps(leave)
        def destroy_process_group(*arguments: Any, **named: Any) -> Any:
            self._finish()
            return leave(*arguments, **named)

        dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy_process_group
        if not self.pipelined:
            return
        read = torch.nn.Module.state_dict

        @functools.wraps(read)
        def state_dict(*arguments: Any, **named: Any) -> Any:
            if self.swapped and threading.get_ident() == self.thread:
                self.sync.flush()
            return read(*arguments, **named)

        torch.nn.Module.state_dict = state_dict  # type: ignore[method-assign]

        def no_state() -> NoReturn:
            with self._guarded():
                raise self._refusal(
                    "pipeline divides the optimizer's state among ranks, and the script saves it", "Use overlap."
                )
            raise SystemExit(UsageError.exit_code)

        self.optimizer.state_dict = no_state

    # --- after the swap -----------------------------------------------------------------------------------------------

    def _begin_step(self, *_: Any) -> None:
        """The first forward or backward of a step."""
        if not self.begun and torch.is_grad_enabled():
            self.begun = True
            with self._own_call():
                self.sync.zero()

    def _before_backward(self) -> None:
        if self.passes == 1:
            self._begin_step()
            if self.pipelined:
                with self._own_call():
                    self.sync.flush()
                self.update.take_settings()
        elif self.synced:
            rule = f"step {self.step} has more than {self.usual_passes} backward passes, the steps before had not"
            raise self._refusal(rule, "Use as many in every step.")
        self.accumulating: AbstractContextManager[object] = ExitStack()
        if self.passes < self.usual_passes and not self.reference:
            self.accumulating = self.sync.accumulating()
        self.accumulating.__enter__()

    def _after_backward(self) -> None:
        self.accumulating.__exit__(None, None, None)
        if self.passes == self.usual_passes:
            self._synchronise()

    def _synchronise(self) -> None:
        self.synced = True
        for parameter in self.trained if self.views else ():
            if parameter.grad is None:  # it got no gradient in this step: zero counts
                self.views[id(parameter)].zero_()
                parameter.grad = self.views[id(parameter)]
        with self._own_call():
            self.sync.step()

    def _place(self, number: int, parameter: Any) -> None:
        """The hook of backward: the gradient moves to the buffer that it is sent from."""
        view = self.views.get(id(parameter))
        if view is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if self.step < self.first + 2:
            self.local[number] = sample(parameter.grad)

    def _finish(self) -> None:
        if self.sync is not None:
            with self._own_call():
                sync, self.sync = self.sync, None
                sync.close()

    # --- the script's own collectives ---------------------------------------------------------------------------------

    def _replace_collectives(self) -> None:
        for name in REPLACED:
            for module in (dist, distributed_c10d):
                setattr(module, name, self._replaced(name, getattr(module, name)))

    def _replaced(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            if self.is_ours() or not self.window or threading.get_ident() != self.thread:
                return original(*arguments, **named)
            if not self.swapped:
                return self._watched(name, original, arguments, named)
            key = (name, call_site())
            call = Call(name, arguments, named)
            if not self._has_gradient(key, call):
                return original(*arguments, **named)
            with self._guarded():
                if self.step == self.first:
                    self._learn(key, call, original)
                else:
                    self._apply(key, call)
            return Done() if call.asynchronous else None

        return wrapper

    def _watched(self, name: str, original: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Before the swap: note whether the collective carries gradients."""
        if self.lineage is None or not self.calls:
            return original(*arguments, **named)
        call = Call(name, arguments, named)
        with self.lineage.covering():
            tainted = self.lineage.is_from_gradients(call.tensors)
            result = original(*arguments, **named)
        whole = call.group is None or call.group is distributed_c10d._get_default_group()
        row = {"operation": name, "site": call_site(), "tainted": tainted, "whole": whole, "numel": call.numel}
        self.calls[-1].append(row)
        return result

    def _has_gradient(self, key: tuple[str, str], call: Call) -> bool:
        if key in self.gradient_sites and key not in self.other_sites:
            return True
        storages = {storage(p.grad) for p in self.parameters if p.grad is not None}
        if any(storage(tensor) in storages for tensor in call.tensors):
            return True
        return key in self.gradient_sites and call.numel > 1 and call.numel in self.sizes[key]

    def _learn(self, key: tuple[str, str], call: Call, original: Callable[..., Any]) -> None:
        """Run the collective on equal inputs once more and measure by which factor its results differ from them."""
        own = self._own_value(call)
        kept = call.tensor.clone()
        with self._own_call():
            original(**call.blocking)
        if call.operation == "reduce" and not call.is_root:
            call.tensor.copy_(kept)  # undefined there by definition
            return
        for result in call.results:
            found = round_factor(result, own, dist.get_world_size())
            if found is None:
                rule = f"{key[0]} at {key[1]} does not give a multiple of the gradient on equal inputs"
                raise self._refusal(rule, "Edit the script for the mode.")
            if found and self.factors.setdefault(key, found) != found:
                raise self._refusal(
                    f"{key[0]} at {key[1]} scales gradients differently", "Edit the script for the mode."
                )

    def _own_value(self, call: Call) -> Tensor:
        """What this rank has of the gradient that a collective is about."""
        if call.operation in ("gather", "reduce"):
            self.sent_last[call.numel] = call.tensor.detach().clone() if call.operation == "reduce" else call.tensor
        if call.operation == "scatter" and call.is_root:
            return call.sources[dist.get_rank()].clone()
        if call.operation in ("scatter", "broadcast") and not call.is_root:
            storages = {storage(p.grad) for p in self.parameters if p.grad is not None}
            if storage(call.tensor) not in storages:
                return self.sent_last.get(call.numel, call.tensor).clone().reshape(call.tensor.shape)
        return call.tensor.detach().clone()

    def _apply(self, key: tuple[str, str], call: Call) -> None:
        """The closed form of a collective whose inputs are equal on all ranks."""
        if call.operation in ("reduce",) and not call.is_root:
            self._own_value(call)
            return
        factor = self.factors.get(key, 1.0)
        own = self._own_value(call) if call.operation != "all_reduce" else call.tensor
        with torch.no_grad():
            for result in call.results:
                if result is own:
                    result.mul_(factor) if factor != 1 else None
                else:
                    result.copy_(own.mul(factor) if factor != 1 else own)

    # --- own calls, refusals ------------------------------------------------------------------------------------------

    def _replace_clipping(self) -> None:
        """Clipping changes gradients after they were synchronised: they are compared as they were before."""
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                setattr(module, name, self._before_clipping(getattr(module, name)))

    def _before_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            if self.optimizer is not None and self.step < self.first + 2 and self.given is None:
                self.given = [sample(p.grad) for p in self.parameters if p.grad is not None]
            return original(*arguments, **named)

        return wrapper

    @contextmanager
    def _own_call(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _gather(self, row: Tensor) -> list[Tensor]:
        found = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        with self._own_call():
            dist.all_gather(found, row)
        return found

    def _refusal(self, rule: str, way_out: str) -> SpecError:
        return SpecError(f"--instead {self.mode}: {rule}. {way_out}")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the script with a sentence if its synchronisation cannot be replaced."""
        try:
            yield
        except UsageError as error:
            self.send({"kind": "refused", "message": str(error)})
            print(f"testbed: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(UsageError.exit_code)  # the script must not go on, and must not catch this


class EndOfWindow(Part):
    """The first of all parts: what other parts of the observer read is not read by the script."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def backward_began(self, loss: Any) -> None:
        self.close()

    def update_began(self, optimizer: Any) -> None:
        self.close()


class Call:
    """The arguments of one collective of torch.distributed, by their names."""

    SIGNATURES = {
        "all_reduce": ("tensor", "op", "group", "async_op"),
        "reduce": ("tensor", "dst", "op", "group", "async_op", "group_dst"),
        "broadcast": ("tensor", "src", "group", "async_op", "group_src"),
        "gather": ("tensor", "gather_list", "dst", "group", "async_op", "group_dst"),
        "scatter": ("tensor", "scatter_list", "src", "group", "async_op", "group_src"),
        "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    }

    def __init__(self, operation: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.operation = operation
        self.named = dict(zip(self.SIGNATURES[operation], arguments, strict=False)) | named
        self.tensor: Tensor = self.named["tensor"]
        self.group = self.named.get("group")
        self.asynchronous = bool(self.named.get("async_op"))

    @property
    def blocking(self) -> dict[str, Any]:
        return self.named | {"async_op": False}

    @property
    def sources(self) -> list[Tensor]:
        return list(self.named.get("scatter_list") or [])

    @property
    def tensors(self) -> list[Tensor]:
        lists = [self.named.get(name) or [] for name in ("gather_list", "scatter_list", "tensor_list")]
        return [self.tensor, *(tensor for each in lists for tensor in each)]

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def is_root(self) -> bool:
        roots = (self.named.get(name) for name in ("dst", "src", "group_dst", "group_src"))
        return next((root for root in roots if root is not None), 0) == dist.get_rank()

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the collective writes on this rank."""
        if self.operation in ("gather", "all_gather"):
            return list(self.named.get("gather_list") or self.named.get("tensor_list") or [])
        return [self.tensor]


class Done(dist.Work):
    """The work of a collective that was replaced: it has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def sample(gradient: Tensor) -> Tensor:
    """Some numbers of a gradient, at the same places on all ranks."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, -(-len(flat) // SAMPLES))].clone()


def fit_to_mean(locals_: Tensor, givens: Tensor) -> tuple[float, float]:
    """Factor and residual of what the ranks' optimizers get (rows) against the mean of the ranks' gradients (rows)."""
    mean = locals_.mean(0)
    square = float(mean @ mean)
    if not square > 0:
        return 0.0, float("inf")
    factors = [float(given @ mean) / square for given in givens]
    worst = max(factors, key=lambda factor: abs(factor - 1))
    residuals = [
        float((given - factor * mean).norm()) / max(float(given.norm()), 1e-300)
        for given, factor in zip(givens, factors, strict=True)
    ]
    return worst, max(residuals)


def fits(found: Tensor, expected: Tensor) -> bool:
    """True if both are equal up to the tolerance."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def round_factor(result: Tensor, own: Tensor, n: int) -> float | None:
    """The factor between both: 1, N or 1/N; 0 if they are zero, None if it is none of these."""
    a, b = result.detach().double().reshape(-1), own.detach().double().reshape(-1)
    for factor in (1.0, float(n), 1.0 / n):
        if float((a - factor * b).norm()) <= TOLERANCE * float(a.norm()):
            return factor if float(a.norm()) > 0 else 0.0
    return None


def ordered(root: Any, trained: list[Any]) -> list[Any]:
    """The parameters in the order of the model, which is that of forward; else in the order of the optimizer."""
    if root is None:
        return trained
    ids = {id(p) for p in trained}
    return [p for p in root.parameters() if id(p) in ids]
