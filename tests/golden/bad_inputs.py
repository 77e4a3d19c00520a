"""Inputs that must be refused. Each: a name, the command, and files and variables that it needs.

Commands are run in an empty folder TMP without an engine, an SSH configuration or data.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bad:
    """One command; its first word is testbed, fab, rank, entrypoint or render."""

    command: str
    files: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


RUN = "testbed run --on process --model lenet5 --data synthetic --nodes 2 --batch 16 --steps 3"
HOSTS = {"hosts.toml": '[[nodes]]\nname = "a"\naddress = "192.0.2.1"\n\n[[nodes]]\nname = "b"\naddress = "192.0.2.2"\n'}
FAB = "fab --inventory hosts.toml"
CONTAINER = {"RANK": "0", "NODES": "2", "MODEL": "lenet5", "DATA": "synthetic", "GLOO_SOCKET_IFNAME": "golden0"}


def _modes() -> list[Bad]:
    words = """rong ring/ RING ring//flat ring/flat/overlap gather/pipeline ring/param/pipeline
    server/bucket:1MiB/overlap single/param none/fp16 ring/topk:0.01 ddp/flat ddp/bucket:5MiB/overlap
    ddp/every:4 single/every:2 server/every:2 ring/every:0 ring/bucket:2MiB/overlap/every:2 ring/fp16/every:2
    ring/bucket ring/bucket:0 ring/bucket:5XB ring/bucket:2MiB/pipeline/fp16 ring/fp16/flat ring/topk:2
    direct/powersgd:0 ddp/topk:0.01 ring/every:2@x"""
    return [Bad(f"{RUN} --mode {word}") for word in words.split()]


def _flags() -> list[Bad]:
    flags = """--rate fast|--rate 0mbit|--rate -5mbit|--rate 200|--batch 15|--batch 0|--batch x
    --batch 16 --batch-per-rank 8|--nodes 1|--nodes 0|--nodes 257|--nodes two|--steps 0|--steps 2|--steps x
    --seed -1|--seed 5000000000|--model alexnet99|--model Bad!|--data imagenet|--data cifar10|--retries x
    --retries 101|--on moon|--on compose|--on hosts|--inventory x.toml|--accept-new|--rate 100mbit
    --resume nowhere|--resume nowhere --mode ddp|--nonsense|--mode|--set|--out plain/x"""
    return [Bad(f"{RUN} {flag}", {"plain": ""}) for flag in flags.replace("\n    ", "|").split("|")]


def _settings() -> list[Bad]:
    settings = """lr|=1|optimiser.lr=0.1|optimizer.lr=0|optimizer.lr=fast|optimizer.momentum=1
    optimizer.name=lion|nodes.x=1|link.delay=10|link.jitter=1ms|link.loss=1|link.loss=2%|link.queue=0s
    link.segment=1KiB|link.rate=1tb|link.delay=10ms|overrides.node7.cpus=0.5|overrides.node1.link.rate=slow
    node.cpus=0|node.congestion=BBR|data.shares=[1,2]|data.shares=[8,8,8]|placement=after-step mode=ddp
    placement=sideways|accumulate=3|micro_batch=3|warmup=3|warmup=-1|threads=0|port=70000|deadline=0
    checkpoint=0|dtype=float16|evaluate=maybe|batchnorm=none|epochs=0|faults=kill"""
    return [
        Bad(" ".join([RUN, *(f"--set {each}" for each in setting.split())]))
        for setting in settings.replace("\n    ", "|").split("|")
    ]


def _faults() -> list[Bad]:
    faults = """kill explode:rank1@step1 kill:rank7@step1 kill:rank1@step9 kill:rank1@step1+3s
    kill:rank1@step1=5 rate:rank1@step1 rate:rank1@step1=fast slow:rank1@step1=2 slow:rank1@step1=0cpu
    pause:rank1@later cut:rank1@step1 oom:rank1@step1 pause:rankx@step1 rate:rank1@step1=50mbit"""
    return [Bad(f"{RUN} --fault {fault}") for fault in faults.split()]


def _files() -> list[Bad]:
    head = 'title = "t"\n'
    experiments = {
        "broken TOML": "title = ",
        "no title": "[axes]\nmode = ['ring']\n",
        "an unknown key": head + "colour = 1\n",
        "an empty axis": head + "[axes]\nmode = []\n",
        "a value twice": head + "[axes]\nmode = ['ring', 'ring']\n",
        "an unknown mode": head + "[axes]\nmode = ['rong']\n",
        "too many runs": head + f"[axes]\nseed = {list(range(200))}\nsteps = {list(range(10, 110))}\n",
        "an unknown axis": head + "[axes]\nspeed = [1]\n",
        "repeats": head + "repeats = 0\n",
        "a table in the way": head + "[base]\nmode = 'ring'\n[axes]\n'mode.x' = [1]\n",
    }
    inventories = {
        "no nodes": "nodes = []\n",
        "no address": '[[nodes]]\nname = "a"\n',
        "a name twice": HOSTS["hosts.toml"].replace('"b"', '"a"'),
        "a name for a shell": '[[nodes]]\nname = "a;b"\naddress = "192.0.2.1"\n',
        "a port": '[[nodes]]\nname = "a"\naddress = "192.0.2.1"\nport = 0\n',
        "a user": '[[nodes]]\nname = "a"\naddress = "192.0.2.1"\nuser = "-o"\n',
        "an unknown key": '[[nodes]]\nname = "a"\naddress = "192.0.2.1"\ncolor = "red"\n',
        "broken": "[[nodes",
    }
    on_hosts = "testbed run --on hosts --inventory hosts.toml --data synthetic"
    return [
        *(Bad("testbed sweep --on process x.toml", {"x.toml": text}) for text in experiments.values()),
        Bad("testbed sweep missing.toml"),
        Bad("testbed sweep ."),
        Bad("testbed sweep x.toml --set mode=ddp", {"x.toml": head + "[axes]\nmode = ['ring']\n"}),
        *(Bad(on_hosts, {"hosts.toml": text}) for text in inventories.values()),
        Bad(f"{on_hosts} --nodes 5", HOSTS),
        Bad(f"{on_hosts} --rate 100mbit", HOSTS),
        Bad(f"{on_hosts} --set link.segment=8KiB", HOSTS),
        Bad(f"{on_hosts} --fault cut:rank1@step1", HOSTS),
        Bad(on_hosts),
    ]


def _folders() -> list[Bad]:
    tune = "testbed tune --on process --data synthetic --nodes 2 --out x.toml --minutes 0.01"
    spec = '{"schema": 3, "mode": "ring", "nodes": 2, "batch": 16, "steps": 3, "model": "lenet5"}'
    return [
        Bad("testbed report nowhere"),
        Bad("testbed report ."),
        Bad("testbed compare nowhere elsewhere"),
        Bad("testbed trace nowhere"),
        Bad("testbed trace run", {"run/spec.json": spec}),
        Bad("testbed run --resume run", {"run/spec.json": "{"}),
        Bad("testbed run --resume run", {"run/spec.json": "[]"}),
        Bad("testbed run --resume run", {"run/spec.json": spec.replace("3,", "1,", 1)}),
        Bad("testbed run --resume run", {"run/spec.json": spec.replace("ring", "rong")}),
        Bad("testbed run --resume run --on netns", {"run/spec.json": spec, "run/substrate.txt": "process\n"}),
        Bad("testbed run --resume run --on process", {"run/spec.json": spec}),
        Bad("testbed run --resume run --on process --retries many", {"run/spec.json": spec}),
        Bad("testbed report run", {"run/spec.json": spec, "run/summary.json": "{}"}),
        Bad("testbed data get imagenet"),
        Bad("testbed data verify cifar10"),
        Bad("testbed data"),
        Bad("testbed nonsense"),
        Bad(f"{tune} --mode ring/bucket:5MiB"),
        Bad(f"{tune} --mode single"),
        Bad(f"{tune} --mode ring/every:2"),
        Bad(f"{tune} --mode rong"),
        Bad(f"{tune} --nodes 1"),
        Bad("testbed tune --out nowhere/x.toml --on process --data synthetic --nodes 2"),
        Bad("testbed tune --minutes x"),
    ]


def _hosts() -> list[Bad]:
    flags = """run --mode rong|run --on netns|run --rate 100mbit|run --nodes 0|run --nodes 5|run --nodes two
    run --batch 15|run --set lr|run --fault cut:rank1@step1|run --fault x|run --model Bad! --data synthetic
    sweep missing.toml|nonsense|logs --lines x|logs --run a/b|collect --run -x|stop --run ../x
    deploy --data imagenet|deploy --data mnist|run --inventory other.toml|doctor --nodes 1 run --nodes 2"""
    return [
        *(Bad(f"{FAB} {flag}", HOSTS) for flag in flags.replace("\n    ", "|").split("|")),
        Bad("fab status"),
        Bad("fab --inventory missing.toml status"),
        Bad("fab status", env={"TESTBED_INVENTORY": "missing.toml"}),
    ]


def _containers() -> list[Bad]:
    changes = """MODE=rong|RATE=fast|SHAPING=maybe|NODES=1|NODES=x|RANK=2|RANK=x|BATCH=15|BATCH=x|STEPS=0
    SEED=-1|MODEL=Bad!|DATA=imagenet|CONGESTION=BBR|CPU_QUOTA=x|SET=lr|SET='|SET=node.cpus=2|SET=nodes=3
    SET=overrides.node1.cpus=0.1|SET=faults=["kill:rank1@step1"]|SET=retries=1|SET=link.loss=2|MASTER_PORT=x"""
    launched = {"RANK": "0", "WORLD_SIZE": "2"}
    spec = '{"schema": 3, "mode": "ring", "nodes": 2, "batch": 16, "steps": 3, "model": "lenet5"}'
    return [
        *(
            Bad("entrypoint", env=CONTAINER | dict([change.split("=", 1)]))
            for change in changes.replace("\n    ", "|").split("|")
        ),
        Bad("entrypoint", env=CONTAINER | {"TESTBED_RUNS": "TMP/nowhere"}),
        Bad("entrypoint", env=launched | {"RATE": "100mbit"}),
        Bad("entrypoint", env=launched | {"SET": "link.rate=1gbit"}),
        Bad("rank"),
        Bad("rank --folder nowhere"),
        Bad("rank --folder run", {"run/spec.json": "{"}),
        Bad("rank --folder run", {"run/spec.json": spec.replace("3,", "1,", 1)}),
        Bad("rank --folder run", {"run/spec.json": spec}, {"RANK": "x"}),
        Bad("rank --folder run", {"run/spec.json": spec}, {"RANK": "0", "WORLD_SIZE": "3"}),
        Bad("rank --folder run", {"run/spec.json": spec}, {"RANK": "2", "WORLD_SIZE": "2"}),
        Bad("render 0"),
        Bad("render 257"),
        Bad("render x"),
    ]


CASES = [*_modes(), *_flags(), *_settings(), *_faults(), *_files(), *_folders(), *_hosts(), *_containers()]
