"""`--instead MODE`: the user's script keeps its training loop, and a mode of the testbed synchronises its gradients.

    steps 0 to 3   The script synchronises. Samples of the gradients show whether the optimizer gets their mean over all
                   ranks, and lineage.py finds the script's collectives that carry gradients. If the optimizer does not
                   get the mean, the script is refused.
    step 4         The mode averages at the end of backward. The script's own collectives on gradients still run, on
                   inputs that are now equal on all ranks, and the factor of each result is measured.
    from step 5    Each of these collectives is replaced by its closed form on equal inputs (closed_form.py), so that
                   the script's own arithmetic on the result stays right, e.g. the division by N after all_reduce.

In steps 4 and 5 the gradients are compared with the mean again. A script that uses DDP has no such collectives; there
DDP's reduction is switched off. All other collectives of the script (metrics, barriers, start values) run as before. A
script is refused on all ranks with the same sentence and ends with exit code 2.
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

from testbed.attach.closed_form import REPLACED, TOLERANCE, Call, ClosedForms, Done, Site
from testbed.attach.events import Collective, Hub, Part, call_site, caller
from testbed.attach.lineage import Lineage, storage
from testbed.attach.sampling import hook_first
from testbed.attach.steps import leave_together
from testbed.spec.errors import NoClosedForm, SpecError, UsageError

REFUSED_TIMEOUT_S = 10.0  # for the slowest rank to find the same error
SAMPLES = 64  # compared numbers of each parameter's gradient


class Instead(Part):
    """Replaces the synchronisation of a script. `request`: a RunSpec as JSON. `timeline` returns that of the steps."""

    essential = True  # a script whose gradients are not synchronised must not go on

    def __init__(
        self,
        hub: Hub,
        send: Callable[[dict[str, Any]], None],
        request: dict[str, Any],
        first: int,
        timeline: Callable[[], Any],
        replaces: Part,
        rate: float | None,
    ) -> None:
        self.hub, self.send, self.request, self.timeline = hub, send, request, timeline
        self.rate = rate  # byte/s of payload on the slowest link, as measured before the script began; None: unknown
        self.first = first  # the first step that the mode synchronises
        self.replaces = replaces  # the part that samples the script's gradients; it is removed at the swap
        self.mode = str(request["mode"])
        self.deadline = float(request.get("deadline") or 300.0)
        self.thread = threading.get_ident()
        self.inside = 0  # depth of the testbed's own calls in the script's thread
        self.step = self.passes = 0
        self.wrappers: list[Any] = []  # DDP modules
        self.optimizer: Any = None  # the first optimizer that updates in a step
        self.others: list[Any] = []  # optimizers that update after `optimizer`, without a backward pass in between
        self.parameters: list[Any] = []
        self.called: list[Any] = []  # modules in the order of their first forward
        self.hooks: list[Any] = []
        self.lineage: Lineage | None = None
        self.window = False  # True between the end of the last backward pass and the optimizer's step
        self.calls: list[list[dict[str, Any]]] = []  # collectives in that window, one list a step
        self.local: dict[int, Tensor] = {}
        self.given: list[Tensor] | None = None
        self.passes_seen: set[int] = set()
        self.without: set[int] | None = None  # numbers of the parameters that got no gradient
        self.fits: list[tuple[float, float]] = []  # factor and residual
        self.sync: Any = None
        self.begun = self.synced = False
        self.gradient_sites: set[Site] = set()
        self.other_sites: set[Site] = set()
        self.sizes: dict[Site, set[int]] = {}
        self.in_backward = False
        self.backward_sites: set[Site] = set()  # all_reduce of gradients in hooks of backward
        self.copies: dict[str, None] = {}  # other collectives in hooks of backward
        self.forms = ClosedForms(self._own_call)
        hub.muted = self.is_ours
        hub.parts.insert(0, EndOfWindow(self._close_window))
        self._replace_collectives()
        self._replace_clipping()

    @property
    def swapped(self) -> bool:
        return self.sync is not None

    def is_ours(self) -> bool:
        """Return True if the present call is the mode's own communication, not the script's."""
        return self.inside > 0 or (self.swapped and threading.get_ident() != self.thread)

    # --- events of the script ----------------------------------------------------------------------------------------

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        if kind == "DistributedDataParallel":
            self.wrappers.append(module)

    def group_made(self) -> None:
        with self._guarded():
            self._load_packages()

    def backward_began(self, loss: Any) -> None:
        self.passes += 1
        self.in_backward = True
        with self._guarded():
            if self.sync is not None:
                self._before_backward()

    def backward_ended(self, reduced: list[Collective]) -> None:
        self.in_backward = False
        with self._guarded():
            if self.sync is not None:
                self._after_backward()
            elif self.optimizer is not None and self.step < self.first:
                if self.passes == 1:
                    self.calls.append([])
                self._open_window(gradients=True)
        self.window = True

    def update_began(self, optimizer: Any) -> None:
        with self._guarded():
            if self.optimizer is None:
                self._begin(optimizer)
            elif optimizer is self.optimizer:
                self._before_update()
            else:
                self._check_other(optimizer)
        self.window = False

    def update_ended(self, optimizer: Any) -> None:
        if optimizer is not self.optimizer:
            return
        with self._guarded():
            self.step += 1
            self.passes, self.given, self.begun, self.synced = 0, None, False, False
            self.local.clear()
            self.forms.start()
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
        """Start to compare gradients at the first update, when the parameters are known.

        Raise SpecError if no mode can be used in this script, e.g. because it has one rank only.
        """
        self.optimizer, self.thread = optimizer, threading.get_ident()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            rule = "the script has no process group of several ranks"
            raise self._refusal(rule, "Use a script that synchronises its gradients.")
        for wrapper in self.wrappers:
            if getattr(wrapper, "static_graph", False):
                raise self._refusal(
                    "DDP has static_graph=True, and its reduction cannot be switched off", "Leave out static_graph."
                )
        self._add_parameters(optimizer)
        self.hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(self._forward_begins))
        self.lineage = Lineage(dist.get_world_size(), self._own_call)

    def _add_parameters(self, optimizer: Any) -> None:
        """Also compare the gradients of this optimizer's parameters. Raise SpecError if modes cannot average them."""
        known = {id(p) for p in self.parameters}
        found = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in (p for p in found if id(p) not in known):
            hook = functools.partial(self._sample, len(self.parameters))
            self.parameters.append(parameter)
            self.hooks.append(hook_first(parameter, hook))
        if any(hasattr(p, "to_local") for p in self.parameters):
            rule = "the script's parameters are sharded (FSDP), and modes average whole gradients"
            raise self._refusal(rule, "Use DDP.")
        if len({p.dtype for p in self.parameters}) > 1:
            raise self._refusal("the script's parameters have several dtypes", "Use one dtype.")

    def _check_other(self, optimizer: Any) -> None:
        """Accept another optimizer as part of the same update. Raise SpecError if a backward pass comes before it."""
        if self.passes or self.pipelined:
            rule = "pipeline updates with one optimizer, and the script has several"
            apart = "the script has several optimizers with a backward pass between their updates"
            raise self._refusal(apart if self.passes else rule, "Use overlap, or a script with one optimizer.")
        if not any(optimizer is each for each in self.others):
            if self.step > 1:
                rule = f"another optimizer begins in step {self.step - 1}"
                raise self._refusal(rule, "Use all optimizers from the first step on.")
            self.others.append(optimizer)
            self._add_parameters(optimizer)

    def _sample(self, number: int, parameter: Any) -> None:
        """Keep some numbers of a gradient that was just accumulated."""
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
                "the script computes gradients inside optimizer.step (a closure)", "Use a script without a closure."
            )
        if self.swapped and not self.synced:  # fewer passes than usual, e.g. at the end of an epoch
            self._synchronise()
        if self.swapped and self.pipelined:
            self.update.check_settings()
            for parameter in self.parameters:
                parameter.grad = None  # this step's update was already made, shard by shard
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
        """True if the optimizer must get the mean from the mode, up to rounding."""
        return not self.pipelined and self.sync.mode.codec is None

    def _compare(self) -> None:
        """Compare the optimizer's gradients with the mean of all ranks. Raise SpecError on all ranks if they differ."""
        numbers = [k for k, p in enumerate(self.parameters) if p.grad is not None]
        given = self.given or [sample(self.parameters[k].grad) for k in numbers]
        missing = [k for k in numbers if k not in self.local]
        local = [self.local.get(k, torch.zeros(0)) for k in numbers]
        row = torch.cat([*local, *given]).double() if numbers and not missing else torch.zeros(0, dtype=torch.float64)
        lengths = self._gather(torch.tensor([len(row)]))
        if len({int(each) for each in lengths}) > 1 or not len(row):
            rule = "not all ranks have gradients of the same parameters, or no parameter has a gradient"
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
            rule = f"with the mode in place the script's gradients are no longer the mean of all ranks ({seen})"
            return rule, "The script changes gradients in a way that cannot be followed. Edit the script for the mode."
        if not float(locals_.abs().max()) > 0:
            return f"the script's gradients are all zero or not a number ({seen})", "Correct the script first."
        if fits(givens, locals_):
            rule = f"the script's gradients are not synchronised: each rank updates with its own ({seen})"
            return rule, "Average the gradients in the script first."
        if residual <= TOLERANCE:
            word = f", the sum is not divided by {n}" if abs(factor - n) < TOLERANCE * n else ""
            word = f", divided by {n} twice" if abs(factor * n - 1) < TOLERANCE else word
            rule = f"the script's gradients are {factor:.4g} times the mean of all ranks{word} ({seen})"
            return rule, "Correct the script first: a mode computes the plain mean."
        rule = f"the script's gradients are not the mean of all ranks ({seen})"
        return rule, "Correct the script first: a mode computes the plain mean."

    # --- the swap -----------------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        assert self.lineage is not None
        for hook in self.hooks:
            hook.remove()
        if len(self.passes_seen) > 1:
            seen = " and ".join(str(each) for each in sorted(self.passes_seen))
            raise self._refusal(f"the script's steps have {seen} backward passes", "Use the same number in every step.")
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
            "replaced": sorted(f"{name} at {line}" for name, line in self.gradient_sites | self.backward_sites),
            "ddp": bool(self.wrappers),
            "chosen": self.chosen,
        }
        self.send({"kind": "swap", "step": self.step, "mode": self.mode, "detail": detail})

    def _agree_on_sites(self) -> None:
        """Decide which collectives of the script carry gradients. The k-th of a step must be the same on all ranks.

        Raise SpecError if one of them cannot be replaced.
        """
        mine = [[(c["operation"], c["tainted"], c["whole"]) for c in step] for step in self.calls]
        everyone: list[Any] = [None] * dist.get_world_size()
        uncovered = self.lineage.uncovered if self.lineage else []
        with self._own_call():
            dist.all_gather_object(everyone, (mine, [*uncovered[:1], ""][0], [*self.copies, ""][0]))
        for _, other, copy in everyone:
            if other:
                rule = f"the script's gradients go through {other}, which has no closed form here"
                raise self._refusal(rule, f"Use one of {', '.join(REPLACED)}, or DDP.")
            if copy:
                rule = f"{copy} runs during backward, and not as all_reduce of all ranks on an accumulated gradient"
                raise self._refusal(rule, "Call it after backward, or on p.grad in a post-accumulate-grad hook.")
        for number, step in enumerate(self.calls):
            rows = [ranks[number] for ranks, *_ in everyone if number < len(ranks)]
            for place, call in enumerate(step):
                same = [row[place] for row in rows if place < len(row) and row[place][0] == call["operation"]]
                if any(tainted for _, tainted, _ in same):
                    if len(same) < len(everyone) or not all(whole for _, _, whole in same):
                        rule = f"{call['operation']} at {call['site']} carries gradients, and not all ranks take part"
                        raise self._refusal(rule, "Use collectives of all ranks.")
                    self.gradient_sites.add((call["operation"], call["site"]))
                    self.sizes.setdefault((call["operation"], call["site"]), set()).add(call["numel"])
                else:
                    self.other_sites.add((call["operation"], call["site"]))
        if not self.wrappers and not self.gradient_sites and not self.backward_sites:
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

    def _load_packages(self) -> None:
        """Raise SpecError, before the first step, if the script's Python lacks a package that the mode needs."""
        try:
            import testbed.attach.takeover
            import testbed.rank.sync.check  # noqa: F401
        except ImportError as error:
            rule = f"the script's Python {sys.executable} lacks a package of the testbed ({error.name})"
            raise self._refusal(rule, f"Install the package there: {sys.executable} -m pip install pydantic.") from None

    def _build(self) -> None:
        """Load the mode and attach it to the model. Raise SpecError if it does not fit the script or gives no mean."""
        from testbed.attach.takeover import ScriptUpdate, parameters_module, switch_off
        from testbed.rank.group import Group
        from testbed.rank.sync.buckets import choose_bucket
        from testbed.rank.sync.check import check_mode
        from testbed.rank.sync.schedules import build
        from testbed.results.timeline import Timeline
        from testbed.spec.run import RunSpec

        spec = RunSpec.load(self.request, where="")
        trained = [p for number, p in enumerate(self.parameters) if number not in (self.without or set())]
        root = self._root(trained)
        self.reference = spec.mode.is_reference
        if (self.pipelined or self.reference) and root is None:
            raise self._refusal(f"{spec.mode}: no module of the script has all trained parameters", "Use overlap.")
        model = root if self.pipelined or self.reference else parameters_module(ordered(root, trained))
        store = dist.PrefixStore("testbed/instead", distributed_c10d._get_default_store())
        rank, size = dist.get_rank(), dist.get_world_size()
        group = Group(rank, size, store, self.deadline, racks=spec.topology.racks, rate=self.rate)
        for wrapper in self.wrappers:
            switch_off(wrapper)
        self.update = ScriptUpdate(self.optimizer)
        with self._own_call():
            size = sum(p.numel() * p.element_size() for p in trained)
            choice = choose_bucket(spec.mode, size, group, spec.limiting_rates)
            spec = spec.model_copy(update={"mode": choice.mode})
            check_mode(spec, model, group)
            timeline = Timeline(detailed=False) if self.reference else self.timeline()
            sync = build(spec.mode, spec.placement, group, timeline, spec.seed)
            before = {id(p): p.grad for p in trained}
            self.views: dict[int, Tensor] = {}
            if not self.pipelined:  # before the mode's own hooks, which launch buckets
                for number, parameter in enumerate(self.parameters):
                    hook_first(parameter, functools.partial(self._place, number))
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
        self.chosen = choice.why
        self._wait_before_reads()

    def _root(self, trained: list[Any]) -> Any:
        """Return the outermost module with all trained parameters that is called in forward; None if there is none."""
        ids = {id(p) for p in trained}
        for module in self.called:
            inner = module.module if module in self.wrappers else module
            if ids <= {id(p) for p in inner.parameters()}:
                return inner
        return None

    def _through(self, module: Any, model: Any) -> None:
        """Replace `model.forward`, so that the script's calls of its model go through `module` (DDP)."""
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
        """Replace the functions that read parameters or leave the group: the mode finishes its communication first."""
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
        """Zero the gradients at the first forward or backward of a step."""
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
            rule = f"step {self.step} has more backward passes than the {self.usual_passes} of each step before"
            raise self._refusal(rule, "Use the same number in every step.")
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
            if parameter.grad is None:  # no gradient in this step counts as zero
                self.views[id(parameter)].zero_()
                parameter.grad = self.views[id(parameter)]
        with self._own_call():
            self.sync.step()

    def _place(self, number: int, parameter: Any) -> None:
        """Move a gradient that was just accumulated to the buffer from which the mode sends it."""
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
            between = self.window or self.in_backward
            if self.is_ours() or not between or threading.get_ident() != self.thread:
                return original(*arguments, **named)
            call = Call(name, arguments, named, dist.get_rank(), dist.get_world_size())
            if not self.swapped:
                return self._watched(call, original, arguments, named)
            site = (name, call_site())
            if not self._has_gradient(site, call):
                return original(*arguments, **named)
            with self._guarded():
                self._replace(site, call, original)
            return Done(call.results) if call.asynchronous else None

        return wrapper

    def _watched(self, call: Call, original: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Run a collective before the swap, and note whether it carries gradients."""
        if self.lineage is None or not (self.calls or self.in_backward):
            return original(*arguments, **named)
        line, by = caller()
        whole = dist.get_world_size(call.group) == dist.get_world_size()
        if self.in_backward:
            self._watch_hook(call, line, by, whole)
            return original(*arguments, **named)
        with self.lineage.covering():
            tainted = self.lineage.is_from_gradients(call.tensors)
            result = original(*arguments, **named)
        row = {"operation": call.operation, "site": line, "tainted": tainted, "whole": whole, "numel": call.numel}
        self.calls[-1].append(row)
        return result

    def _watch_hook(self, call: Call, line: str, by: str, whole: bool) -> None:
        """Note a collective during backward. The script's hooks call it, unless a library does, e.g. SyncBatchNorm."""
        if self.wrappers or by or call.numel <= 1:
            return
        if whole and call.multiple is not None and call.operation == "all_reduce" and self._is_gradient(call.tensor):
            self.backward_sites.add((call.operation, line))
        else:
            self.copies.setdefault(f"{call.operation} at {line}")

    def _is_gradient(self, *tensors: Tensor) -> bool:
        storages = {storage(p.grad) for p in self.parameters if p.grad is not None}
        return any(storage(tensor) in storages for tensor in tensors)

    def _has_gradient(self, site: Site, call: Call) -> bool:
        if self.in_backward:
            return site in self.backward_sites and self._is_gradient(call.tensor)
        if site in self.gradient_sites and site not in self.other_sites:
            return True
        if self._is_gradient(*call.tensors):
            return True
        return site in self.gradient_sites and call.numel > 1 and call.numel in self.sizes[site]

    def _replace(self, site: Site, call: Call, original: Callable[..., Any]) -> None:
        """Write what the collective gives on equal inputs. In step `first` run it once more and measure its factor."""
        try:
            if self.in_backward:
                self.forms.multiply(call)
            elif self.step == self.first:
                self.forms.learn(site, call, original)
            else:
                self.forms.apply(site, call)
        except NoClosedForm as error:
            raise self._refusal(f"{site[0]} at {site[1]} {error}", "Edit the script for the mode.") from None

    # --- own calls, refusals ------------------------------------------------------------------------------------------

    def _replace_clipping(self) -> None:
        """Replace functions that change synchronised gradients, so that the gradients are sampled before the change."""
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                setattr(module, name, self._before_change(getattr(module, name)))
        scaler: Any = torch.amp.GradScaler
        scaler._unscale_grads_ = self._before_change(scaler._unscale_grads_)

    def _before_change(self, original: Callable[..., Any]) -> Callable[..., Any]:
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
        """On a UsageError in the block, print and send its message, and end the script with exit code 2."""
        try:
            yield
        except UsageError as error:
            self.send({"kind": "refused", "message": str(error)})
            print(f"testbed: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            if dist.is_initialized():
                leave_together("refused", REFUSED_TIMEOUT_S)
            os._exit(UsageError.exit_code)  # the script must not go on, and must not catch this


class EndOfWindow(Part):
    """Closes the window in which reads of gradients are the script's. The first part, because later parts read, too."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def backward_began(self, loss: Any) -> None:
        self.close()

    def update_began(self, optimizer: Any) -> None:
        self.close()


def sample(gradient: Tensor) -> Tensor:
    """Return at most SAMPLES numbers of a gradient, at the same positions on all ranks."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, -(-len(flat) // SAMPLES))].clone()


def fit_to_mean(locals_: Tensor, givens: Tensor) -> tuple[float, float]:
    """Return the worst factor and the largest residual of `givens` against the mean of `locals_`, one row per rank.

    `locals_`: gradients as backward accumulated them. `givens`: gradients as the optimizers get them.
    """
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
    """Return True if both are equal up to TOLERANCE."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def ordered(root: Any, trained: list[Any]) -> list[Any]:
    """Return the parameters in the order of the model `root`, or without it in the order of the optimizer."""
    if root is None:
        return trained
    ids = {id(p) for p in trained}
    return [p for p in root.parameters() if id(p) in ids]
