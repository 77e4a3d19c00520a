"""RunSpec: everything that is requested of one run. Ranks read it from spec.json.

It is made from the command line, from an experiment or from the environment of a container. Every rule that connects
several values is checked here, when the spec is built.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from testbed.spec.base import Spec, validator
from testbed.spec.datasets import TEXT, Shape, dataset_info
from testbed.spec.errors import SchemaError, SpecError, one_line
from testbed.spec.fabric import Fabric, rack_numbers
from testbed.spec.fault import ANY, MAX_FAULTS, Fault, FaultText, draw_random
from testbed.spec.link import Link
from testbed.spec.mode import SCRIPT, Mode, SyncMode, check_method
from testbed.spec.models import BUILT_IN_MODELS, MODELS, model_info
from testbed.spec.own_files import EMULATED, REAL, OwnFile, digest_of, own_method, own_profile, read
from testbed.spec.script import SWAP_STEP, SWAP_WARMUP_STEPS, ScriptSpec
from testbed.spec.topology import EXAMPLE, Topology, as_lists, missing_or_unknown
from testbed.spec.words import can_set, name_of, refuse_setting, setting

START_DEADLINE_S = 60.0  # for all ranks to start and connect
STEP_DEADLINE_S = 20.0  # for one wait in a step, in addition to the time of the transfer
DEFAULT_PORT = 29_500  # of the rendezvous, on nodes whose ports no other run uses; the probe uses the next port
MAX_DIVISOR = 64  # divisors up to this are named in a message
MAX_DILATION = 1000.0  # with it, a step of a second takes a quarter of an hour
# Version of spec.json, rankN.jsonl, faults.jsonl, receipt.json and summary.json together. It is raised if a key changes
# its meaning or is removed. A new key with a default does not raise it: files without it stay readable, and ranks read
# spec.json with the code that wrote it (an image of other code is refused). An older testbed names the unknown key.
SCHEMA = 3
# Keys of our own training loop. A user's script has its own model, data and batch, so these keys are left out of its
# spec.json.
OF_OUR_LOOP = (
    *("placement", "model", "dtype", "batchnorm", "data", "batch", "batch_per_rank", "accumulate"),
    *("micro_batch", "epochs", "evaluate", "optimizer", "checkpoint", "profile", "layers", "compute", "dilation"),
)
FOLDER_NAME = "letters, digits, _, . and -, beginning with a letter or digit, at most {} characters"


# One fault may be written without a list.
Faults = Annotated[tuple[FaultText, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def _check_compute(compute: str) -> str:
    own_profile(compute)
    return compute


class DataSpec(Spec):
    """The training data, and how the ranks divide it."""

    # a name in DATASETS, file.py:function, or text:FILE
    name: Annotated[str, AfterValidator(validator(lambda name: dataset_info(name).name))] = "cifar10"
    # number of training images, drawn with the seed; None: all
    subset: int | None = Field(default=None, gt=0, examples=[1000])
    test_subset: int | None = Field(default=None, gt=0, examples=[1000])
    partition: Literal["sampler", "fixed"] = "sampler"  # reshuffled every epoch, or the same block every epoch
    augment: bool | None = None  # random crop and flip; None: for cifar10 only
    # images per step, a number for each rank; None: equal numbers
    shares: tuple[int, ...] | None = Field(default=None, examples=[[96, 64, 64, 32]])
    # images are resized to size x size, sequences have this number of tokens; None: the data set's own size
    size: int | None = Field(default=None, ge=8, le=1024, examples=[224])


class OptimizerSpec(Spec):
    """The optimizer. The default learning rate is for VGG-11 on CIFAR-10 at batch 256."""

    name: Literal["sgd", "adam", "rmsprop"] = "sgd"
    lr: float = Field(default=0.02, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    # the global batch for which lr is given; lr is scaled to the run's global batch. None: not scaled
    base_batch: int | None = Field(default=None, gt=0, examples=[256])
    warmup: int = Field(default=0, ge=0)  # steps over which lr rises linearly to its value
    schedule: Literal["constant", "step", "cosine", "cyclic"] = "constant"
    period: int = Field(default=100, gt=0)  # steps between two drops (step), steps of a half cycle (cyclic)
    gamma: float = Field(default=0.1, gt=0, le=1)  # factor of a drop (step), lowest share of lr (cyclic)
    clip: float | None = Field(default=None, gt=0)  # largest norm of the whole gradient


class NodeSpec(Spec):
    """A node's share of the machine."""

    cpus: float | None = Field(default=None, gt=0, le=1024, examples=[0.4])  # cores; None: no limit
    pinned: bool = True  # the node gets an affinity to certain cores, if these can be divided evenly
    congestion: str | None = Field(  # TCP congestion control
        default="cubic", pattern=r"^[a-z0-9_]{1,15}$", description="at most 15 lower-case letters, digits and _"
    )


class NodeOverride(Spec):
    """What differs on one node."""

    cpus: float | None = Field(default=None, gt=0, le=1024, examples=[0.1])
    link: Link | None = None


class RunSpec(Spec):
    """One run: mode, size, network, seed. Every key has a default."""

    version: int = Field(default=SCHEMA, alias="schema")
    experiment: str = Field(
        default="adhoc", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description=FOLDER_NAME.format(64)
    )
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description=FOLDER_NAME.format(128))

    mode: Mode = Field(default=SyncMode.parse("ring"), examples=["ring"])
    # the user's training script, which replaces our loop; it has its own model, data and batch
    script: ScriptSpec | None = None
    # after-step: the mistake of published experiment R3 (experiments/r3.toml)
    placement: Literal["before-step", "after-step"] = "before-step"
    nodes: int = Field(default=4, ge=1, le=256)
    # a name in MODELS, or file.py:function
    model: Annotated[str, AfterValidator(validator(lambda name: model_info(name).name))] = "vgg11"
    # SHA-256 of the user's own files that mode, model, data and compute name, by their paths; the run folder has copies
    files: dict[str, str] = Field(default={}, examples=[{"my_model.py": "5f70bf18a08660b2..."}])
    # real; emulated:FILE replays the times of the profile FILE; emulated records a profile before the run
    compute: Annotated[str, AfterValidator(validator(_check_compute))] = Field(default=REAL, examples=[EMULATED])
    # factor by which all times of an emulated run are longer; readers divide by it. None: the testbed chooses it
    dilation: float | None = Field(default=None, ge=1, le=MAX_DILATION, examples=[4.0])
    dtype: Literal["float32", "float64"] = "float32"
    batchnorm: Literal["local", "broadcast", "average", "untracked"] = "broadcast"

    data: DataSpec = DataSpec()
    batch: int | None = Field(default=None, gt=0, examples=[256])  # images per step over all ranks
    batch_per_rank: int | None = Field(default=None, gt=0, examples=[64])  # instead of `batch`
    accumulate: int = Field(default=1, ge=1)  # micro-batches per step, with one synchronisation
    # instead of `accumulate`: images per forward pass
    micro_batch: int | None = Field(default=None, gt=0, examples=[16])
    steps: int | None = Field(default=None, gt=0, examples=[40])
    epochs: int | None = Field(default=None, gt=0, examples=[10])
    warmup: int = Field(default=2, ge=0)  # first steps, left out of all times
    evaluate: Literal["split", "every-rank", "never"] = "split"
    seed: int = Field(default=0, ge=0, lt=2**31)
    optimizer: OptimizerSpec = OptimizerSpec()

    threads: int = Field(default=1, ge=1, le=256)  # of torch, on every rank
    node: NodeSpec = NodeSpec()
    link: Link = Link()
    topology: Topology = Topology()
    # "node2" -> what differs there
    overrides: dict[str, NodeOverride] = Field(default={}, examples=[{"node2": {"cpus": 0.1}}])
    probe: bool = True  # measure the network before training
    keep_going: bool = False  # train even if the network is not the requested one; the run is marked invalid
    spans: bool = True  # record every phase, buffer and stall of a step; False: sums only
    profile: bool = False  # run torch.profiler over the first steps after warm-up, which makes these steps slower
    layers: bool = False  # record how long each layer computes: profile.json in the run folder
    # seconds that one wait may take; None: calculated from the rate of the link
    deadline: float | None = Field(default=None, gt=0, le=86400, examples=[60.0])
    start_deadline: float = Field(default=START_DEADLINE_S, gt=0, le=86400)  # seconds for all ranks to connect
    # steps from one checkpoint to the next; None: no checkpoints
    checkpoint: int | None = Field(default=None, gt=0, examples=[10])
    retries: int = Field(default=0, ge=0, le=100)  # restarts of all ranks from the last checkpoint
    faults: Faults = Field(default=(), max_length=MAX_FAULTS, examples=[["kill:rank2@step10"]])
    port: int = Field(default=0, ge=0, le=65535)  # of the rendezvous; 0: any free port

    @property
    def world(self) -> int:
        """The number of ranks that train: one in `single`, else one per node."""
        return self.nodes if self.mode.distributed else 1

    @property
    def global_batch(self) -> int:
        return self.batch if self.batch is not None else (self.batch_per_rank or 0) * self.world

    @property
    def emulated(self) -> bool:
        """True if recorded times are replayed, so that loss and accuracy have no meaning."""
        return self.compute != REAL

    def local_batch(self, rank: int) -> int:
        """Return the images per step of one rank."""
        return self.data.shares[rank] if self.uneven and self.data.shares else self.global_batch // self.world

    def passes(self, rank: int) -> int:
        """Return the micro-batches per step of one rank."""
        return self.local_batch(rank) // self.micro_batch if self.micro_batch else self.accumulate

    def sample_shape(self, *, resized: bool = True) -> Shape:
        """Return the shape of an image or a sequence as the model gets it; with `resized` False, as images are stored.

        It is empty for a user's data set, whose shape is known when a rank has executed the file.
        """
        info = dataset_info(self.data.name)
        if info.unit == "sequences":
            return (self.data.size or info.shape[0],)
        if info.unit == "samples":
            return ()
        channels, height, width = info.shape
        if info.generated:
            channels = model_info(self.model).usual_channels
        size = self.data.size if resized else None
        return (channels, size or height, size or width)

    @property
    def own_files(self) -> dict[str, tuple[str, OwnFile]]:
        """The user's own files by the key that refers to them: the text of the key, and the file."""
        found: dict[str, tuple[str, OwnFile | None]] = {"compute": (self.compute, own_profile(self.compute))}
        if not self.emulated:  # an emulated run needs neither the model's code nor the data
            found["model"] = (self.model, model_info(self.model).own)
            found["data.name"] = (self.data.name, dataset_info(self.data.name).own)
        found["mode"] = (str(self.mode), own_method(self.mode.algorithm) if self.mode.is_own else None)
        return {key: (name, own) for key, (name, own) in found.items() if own}

    def with_files(self) -> RunSpec:
        """Return the spec with the SHA-256 of the user's own files. Raises SpecError if a file cannot be used."""
        check_method(self.mode)
        files = {own.path: digest_of(read(name_of(key), name, own)) for key, (name, own) in self.own_files.items()}
        return self.model_copy(update={"files": files})

    def link_of(self, rank: int) -> Link:
        """Return the link of a node: its override, else the link of all nodes."""
        return self._override(rank).link or self.link

    @property
    def rates(self) -> list[int | None]:
        """The requested rates of the links of all ranks in bit/s; None for a link without a limit."""
        return [self.link_of(rank).rate for rank in range(self.world)]

    @property
    def fabric(self) -> Fabric:
        """The requested rates and distances of links and uplinks, by rank."""
        topology = self.topology
        return Fabric.of(
            self.rates,
            rack_numbers(topology.racks, self.world),
            topology.uplink,
            (self.link_of(rank).distance for rank in range(self.world)),
            topology.delay or 0.0,
        )

    @property
    def limiting_rates(self) -> list[int]:
        """The requested rates of all links and of the uplinks in bit/s, without those that are not limited."""
        return [rate for rate in (*self.rates, self.topology.uplink if self.world > 1 else None) if rate]

    def cpus_of(self, rank: int) -> float | None:
        """Return the CPU share of a node in cores: its override, else the share of all nodes."""
        return self._override(rank).cpus or self.node.cpus

    def _override(self, rank: int) -> NodeOverride:
        return self.overrides.get(f"node{rank}", NodeOverride())

    @property
    def links_requested(self) -> str:
        """All requested links in words, including those of single nodes and of racks; empty if there are none."""
        links = {"": self.link} | {f" of {name}": own.link for name, own in self.overrides.items() if own.link}
        requested = {whose: link.model_dump_json(exclude_defaults=True) for whose, link in links.items() if link.shaped}
        words = [f"link {link}{whose}" for whose, link in requested.items()]
        return ", ".join([*words, *([self.topology.requested] if self.topology.requested else [])])

    def without_shaping(self, *, keep_cpus: bool = False) -> RunSpec:
        """Return the spec without links, uplinks, overrides, congestion control and CPU quota.

        It is for substrates that apply none of these. `keep_cpus` keeps the CPU quota that is the same for all nodes.
        The racks stay, because they say where the nodes are.
        """
        node = self.node.model_copy(update={"congestion": None, "cpus": self.node.cpus if keep_cpus else None})
        topology = Topology(racks=self.topology.racks)
        return self.model_copy(update={"link": Link(), "topology": topology, "node": node, "overrides": {}})

    def without_quotas(self) -> RunSpec:
        """Return the spec without CPU quotas."""
        own = {name: each.model_copy(update={"cpus": None}) for name, each in self.overrides.items()}
        kept = {name: each for name, each in own.items() if each.link is not None}
        return self.model_copy(update={"node": self.node.model_copy(update={"cpus": None}), "overrides": kept})

    def fault_schedule(self) -> tuple[Fault, ...]:
        """Return the faults with every `?` replaced by a drawn number. The same seed draws the same numbers."""
        return draw_random(self.faults, self.seed, self.world, self.steps)

    @property
    def uneven(self) -> bool:
        return self.data.shares is not None and self.world > 1

    @property
    def replicas_must_agree(self) -> bool:
        """False for runs whose replicas differ on purpose; else True."""
        return self.placement == "before-step" and not self.mode.is_control

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # pydantic refuses such values
        values = dict(values)
        if values.get("batch") is None and values.get("batch_per_rank") is None:
            values |= {"batch": 256} if values.get("script") is None else {"batch_per_rank": 1}
        if values.get("steps") is None and values.get("epochs") is None and values.get("script") is None:
            values["steps"] = 40
        if _takes_text(values.get("model")):
            data = values.get("data", {})
            values["data"] = {"name": TEXT.name} | data if isinstance(data, dict) else data
        if values.get("script") is not None and str(values.get("mode")) != SCRIPT:
            values.setdefault("warmup", SWAP_WARMUP_STEPS)
        if str(values.get("compute", REAL)).startswith(EMULATED):
            values.setdefault("evaluate", "never")
        return values

    @model_validator(mode="after")
    def _rules(self) -> RunSpec:
        for rule in (
            _check_script,
            _check_model,
            _check_images,
            _check_nodes,
            _check_racks,
            _check_shares,
            _check_batch,
            _check_overrides,
            _check_placement,
            _check_length,
            _check_layers,
            _check_emulated,
            _check_faults,
        ):
            validator(rule)(self)
        return self

    @model_serializer(mode="wrap")
    def _without_our_loop(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return values if self.script is None else {k: v for k, v in values.items() if k not in OF_OUR_LOOP}

    def to_json(self) -> str:
        """Return the content of spec.json, with every value written out."""
        return self.model_dump_json(by_alias=True, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> RunSpec:
        """Parse spec.json. Raises SchemaError if another version wrote it, SpecError if it is damaged."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{where}: not JSON ({error}). Write it with `testbed run`.") from None
        if not isinstance(values, dict):
            raise SpecError(f"{where}: holds a {type(values).__name__}, not a run. Write it with `testbed run`.")
        check_schema(values.get("schema"), where)
        return cls.load(values, where)


def check_schema(number: object, where: str) -> None:
    """Raise SchemaError if a file has another schema number than this version."""
    if number != SCHEMA:
        rule = f"schema {one_line(str(number))}, this testbed reads schema {SCHEMA}"
        raise SchemaError(f"{where}: {rule}. Run it again, or use the version of testbed that wrote it.")


def _check_script(spec: RunSpec) -> None:
    if spec.mode.is_script and spec.script is None:
        rule = "runs your own training script, and no script was given"
        raise refuse_setting("mode", str(spec.mode), rule, "Use `testbed exec -- python main.py`.")
    if spec.script is not None and not spec.mode.is_script:
        _check_instead(spec)


def _check_instead(spec: RunSpec) -> None:
    """Raise SpecError if a mode that is to replace a script's synchronisation does not average gradients every step."""
    mode, way_out = str(spec.mode), "Use a mode that averages gradients in every step, e.g. ring/bucket:2MiB/overlap."
    if spec.mode.silent:
        raise SpecError(f"--instead {mode}: synchronises nothing. {way_out}")
    if spec.mode.row.sends_parameters or spec.mode.every > 1:
        raise SpecError(f"--instead {mode}: sends parameters, and a script's gradients are replaced. {way_out}")
    if spec.placement == "after-step":
        raise refuse_setting("placement", spec.placement, "a script decides when it updates", "Leave it out.")
    if spec.warmup < SWAP_WARMUP_STEPS:
        rule = f"the script synchronises by itself up to step {SWAP_STEP}, and two steps prove the mode"
        raise refuse_setting("warmup", spec.warmup, rule, f"Use {SWAP_WARMUP_STEPS} or more.")


def _takes_text(model: object) -> bool:
    return isinstance(model, str) and model in MODELS and MODELS[model].takes == TEXT.unit


def _check_model(spec: RunSpec) -> None:
    info, data = model_info(spec.model), dataset_info(spec.data.name)
    if "samples" in (info.takes, data.unit):
        return  # the shapes of a user's model or data are known only when a rank executes the file
    *channels, size = spec.sample_shape()[:2]  # images are square
    if info.takes != data.unit:
        others = ", ".join(name for name, each in BUILT_IN_MODELS.items() if each.takes == data.unit)
        rule = f"takes {info.takes}, and {data.name} has {data.unit}"
        raise refuse_setting("model", spec.model, rule, f"Use one of {others}, or other data.")
    if channels and info.channels not in (None, *channels):
        rule = f"takes images of {info.channels} channels, and {data.name} has {channels[0]}"
        others = ", ".join(name for name, each in BUILT_IN_MODELS.items() if each.channels is None)
        raise refuse_setting("model", spec.model, rule, f"Use {others}, or other data.")
    if not info.fits(size):
        rule = f"takes {info.takes} of {info.sizes}, and these have {info.in_words(size)}"
        raise refuse_setting("model", spec.model, rule, f"Use {setting('data.size', info.smallest)}, or another model.")


def _check_images(spec: RunSpec) -> None:
    info, data = dataset_info(spec.data.name), spec.data
    for key, requested, available, use in (
        ("subset", data.subset, info.train, "training"),
        ("test_subset", data.test_subset, info.test, "test"),
    ):
        if requested is not None and available is not None and requested > available:
            rule = f"{data.name} has {available} {use} {info.unit}"
            raise refuse_setting(f"data.{key}", requested, rule, "Request fewer.")
    need = spec.global_batch if spec.uneven else spec.world
    if data.subset is not None and data.subset < need:
        rule = f"one step needs at least {need} {info.unit}"
        raise refuse_setting("data.subset", data.subset, rule, "Request more.")


def _check_nodes(spec: RunSpec) -> None:
    if spec.mode.distributed and spec.nodes < 2 and not spec.mode.is_script:
        way_out = f"Use {setting('mode', 'single')}, or {setting('nodes', 2)}."
        raise refuse_setting("nodes", spec.nodes, f"mode {spec.mode} needs at least 2", way_out)


def _check_racks(spec: RunSpec) -> None:
    racks = spec.topology.racks
    reason = missing_or_unknown(racks, spec.nodes) if racks else ""
    if reason:
        raise refuse_setting("topology.racks", as_lists(racks), reason, "Name every node of the run once.")
    if spec.mode.row.follows_racks and not racks and spec.nodes > 1:
        half = (spec.nodes + 1) // 2
        example = EXAMPLE if spec.nodes == 4 else [list(range(half)), list(range(half, spec.nodes))]
        way_out = f"Add e.g. {setting('topology.racks', example)}, or use {setting('mode', 'ring')}."
        raise refuse_setting("mode", str(spec.mode), "averages inside racks first, and there are none", way_out)


def _check_batch(spec: RunSpec) -> None:
    if spec.batch is not None and spec.batch_per_rank is not None:
        other = setting("batch_per_rank", spec.batch_per_rank)
        raise refuse_setting("batch", spec.batch, f"{other} sets the same value", "Give one of them.")
    if not spec.uneven and spec.global_batch % spec.world:
        n, lower = spec.world, spec.global_batch - spec.global_batch % spec.world
        nearest = f"{lower} or {lower + n}" if lower else f"{n}"
        way_out = f"Use {nearest}{', or ' + name_of('batch_per_rank') if can_set('batch_per_rank') else ''}."
        raise refuse_setting("batch", spec.global_batch, f"must be divisible by the {n} ranks", way_out)
    for rank in range(spec.world):
        key = "accumulate" if spec.micro_batch is None else "micro_batch"
        size, parts = spec.local_batch(rank), getattr(spec, key)
        if size % parts:
            divisors = [str(each) for each in range(1, min(size, MAX_DIVISOR) + 1) if size % each == 0]
            way_out = f"Use one of {', '.join(divisors)}."
            raise refuse_setting(key, parts, f"must divide the {size} images of a rank", way_out)
    if spec.micro_batch is not None and spec.accumulate > 1:
        other = setting("accumulate", spec.accumulate)
        raise refuse_setting("micro_batch", spec.micro_batch, f"{other} sets the same value", "Give one of them.")


def _check_shares(spec: RunSpec) -> None:
    shares = spec.data.shares
    if shares is None or not spec.uneven:
        return
    if len(shares) != spec.world or sum(shares) != spec.global_batch or min(shares) < 1:
        rule = f"must be {spec.world} numbers of at least 1 that add up to the batch of {spec.global_batch}"
        raise refuse_setting("data.shares", list(shares), rule, f"Change them, or {name_of('batch')}.")
    if not spec.mode.synchronous:
        rule = f"mode {spec.mode} averages parameters, which weights all ranks alike"
        raise refuse_setting("data.shares", list(shares), rule, "Use a mode without every:K.")


def _check_overrides(spec: RunSpec) -> None:
    names = [f"node{k}" for k in range(spec.nodes)]
    for name in spec.overrides:
        if name not in names:
            rule = f"the run has {len(names)} node{'s' * (len(names) > 1)}. Use {' or '.join(names)}."
            raise SpecError(f"{name_of(f'overrides.{one_line(name)}')}: {rule}")


def _check_placement(spec: RunSpec) -> None:
    mode = spec.mode
    if spec.placement == "after-step" and not (mode.separable and mode.every == 1 and mode.schedule == "after"):
        rule = f"mode {mode} has no gradient exchange that could come after the step"
        way_out = f"Use {name_of('mode')} with gather, allreduce, ring, tree or halving."
        raise refuse_setting("placement", spec.placement, rule, way_out)


def _check_layers(spec: RunSpec) -> None:
    if spec.layers and (spec.mode.is_reference or spec.mode.schedule != "after" or not spec.spans):
        rule = "nothing else may run during backward, and the phases of a step must be recorded"
        way_out = f"Use {setting('mode', 'single')}, or {setting('mode', 'ring')}, with {setting('spans', True)}."
        raise refuse_setting("layers", True, rule, way_out)


def _check_emulated(spec: RunSpec) -> None:
    if spec.emulated and spec.evaluate != "never":
        rule = f"with {setting('compute', spec.compute)} the model learns nothing, so a test has no meaning"
        raise refuse_setting("evaluate", spec.evaluate, rule, f"Use {setting('evaluate', 'never')}, or leave it out.")
    if spec.dilation in (None, 1.0):
        return
    rule = "only emulated compute and shaped links can be made slower"
    if not spec.emulated:
        raise refuse_setting("dilation", spec.dilation, rule, f"Leave it out, or use {setting('compute', EMULATED)}.")
    if spec.faults:
        rule = "the times of faults are those of the machine"
        raise refuse_setting("dilation", spec.dilation, rule, f"Use {setting('dilation', 1.0)}, or no fault.")


def _check_faults(spec: RunSpec) -> None:
    for fault in spec.faults:
        if fault.rank is not None and fault.rank >= spec.world:
            rule = f"there are ranks 0 to {spec.world - 1}"
            raise refuse_setting("faults", str(fault), rule, f"Name one of them, or rank{ANY} for any.")
        if fault.step is not None and spec.steps is not None and fault.step >= spec.steps:
            rule = f"the run ends after step {spec.steps}"
            raise refuse_setting("faults", str(fault), rule, f"Give an earlier step, or a larger {name_of('steps')}.")


def _check_length(spec: RunSpec) -> None:
    if spec.steps is not None and spec.steps <= spec.warmup:
        rule = f"the first {spec.warmup} steps are left out of all times, so no step would remain"
        way_out = f"Use {setting('steps', spec.warmup + 1)} or more, or {setting('warmup', 0)}."
        raise refuse_setting("steps", spec.steps, rule, way_out)
