"""The command line without starting a rank: options, refusals, lists."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.cli.options import OUTSIDE_SPEC
from testbed.results.profile import Profile, ProfiledLayer
from testbed.spec.errors import SpecError, TestbedError, UsageError
from testbed.spec.experiment import spec_from_flags
from testbed.spec.run import RunSpec
from testbed.spec.words import FLAGS


def flags_of(command: str) -> set[str]:
    import typer

    group = typer.main.get_command(main.app)
    return {option for parameter in group.commands[command].params for option in parameter.opts if option[:2] == "--"}


OF_SLURM = ("--partition", "--account", "--time", "--slurm-option", "--python")


def test_the_flags_of_run_are_these_and_no_more():
    assert flags_of("run") == {
        *("--mode", "--nodes", "--rate", "--model", "--data", "--batch", "--batch-per-rank", "--steps", "--seed"),
        *("--on", "--inventory", "--accept-new", "--set", "--profile", "--out", "--json", "--fault", "--retries"),
        *("--resume", "--share", "--keep-going", "--dry-run", *OF_SLURM),
    }


def test_the_flags_of_tune_are_those_of_run_and_minutes():
    of_one_run = {"--profile", "--fault", "--retries", "--resume", "--keep-going", "--dry-run"}
    assert flags_of("tune") == flags_of("run") - of_one_run | {"--minutes"}


def test_the_flags_of_sweep_are_these_and_no_more():
    assert flags_of("sweep") == {
        *("--on", "--inventory", "--accept-new", "--share", "--set", "--profile", "--fresh", "--json"),
        *("--keep-going", "--dry-run", *OF_SLURM),
    }


def test_every_option_of_exec_is_a_key_of_the_spec_or_named_as_none():
    import typer

    parameters = {each.name for each in typer.main.get_command(main.app).commands["exec"].params} - {"help"}
    keys = {FLAGS.get(name, name).partition(".")[0] for name in parameters - OUTSIDE_SPEC}
    assert keys <= set(RunSpec.model_fields) and {"nodes", "link", "faults"} <= keys


HELP = [[], ["data"], ["hosts"]]


@pytest.mark.parametrize("words", HELP, ids=["testbed", *(words[0] for words in HELP[1:])])
def test_the_list_of_commands_has_whole_sentences(words):
    listed = CliRunner().invoke(main.app, [*words, "--help"], terminal_width=80).stdout.partition("Commands:")[2]
    assert len(listed.split("\n")) > 3
    assert [line for line in listed.split("\n") if line and not line.endswith(".")] == []


@pytest.mark.parametrize("command, words", [("exec", "[OPTIONS] -- COMMAND..."), ("tune", "[OPTIONS] [-- COMMAND...]")])
def test_the_usage_of_a_command_for_scripts_shows_where_the_script_goes(command, words):
    assert f"{command} {words}\n" in CliRunner().invoke(main.app, [command, "--help"]).stdout


def test_the_flags_of_profile_are_these_and_no_more():
    of_the_model = {"--model", "--data", "--batch-per-rank", "--cpus", "--steps"}
    assert flags_of("profile") == of_the_model | {"--on", "--share", "--set", "--out", "--json"}


def test_a_profile_is_recorded_on_this_machine_only(capsys):
    assert main.call("testbed", ["profile", "--on", "slurm"]) == UsageError.exit_code
    assert "slurm" in capsys.readouterr().err.lower()


def test_the_table_of_a_profile_has_every_layer_and_the_rest_of_a_step():
    from testbed.control.cli.profile import caption, options, rows

    layer = ProfiledLayer(name="conv", sizes=(4_000_000,), forward_s=0.010, backward_s=0.025)
    times = {"data_s": 0.001, "zero_s": 0.002, "loss_s": 0.003, "optimizer_s": 0.004}
    found = Profile(model="vgg11", batch_per_rank=24, cpus=0.4, layers=(layer,), jitter=(0.98, 1.0, 1.05), **times)
    assert rows(found)[0] == ("conv", "1", "4.00", "10.00", "25.00")
    assert [row[0] for row in rows(found)[1:]] == [
        "all layers",
        "data",
        "loss",
        "clearing gradients",
        "optimizer (sgd)",
    ]
    assert "0.045 s a step" in caption(found) and "-2.0 to +5.0 %" in caption(found) and "0.4 cores" in caption(found)
    assert options(found) == "--model vgg11 --batch-per-rank 24"


def test_the_flags_of_the_commands_that_read_runs_are_these_and_no_more():
    assert flags_of("report") == {"--out", "--json"}
    assert flags_of("compare") == {"--threshold", "--allow-missing", "--json"}
    assert flags_of("trace") == {"--out", "--json"}
    of_a_point = {"--nodes", "--rate", "--delay", "--speed", "--modes"}
    assert flags_of("predict") == of_a_point | {"--profile", "--check", "--dilation", "--out", "--json"}


REFUSALS = {
    "unknown mode": (["--mode", "rong"], ["'rong'", "Known:", "Did you mean ring?"]),
    "illegal cell": (["--mode", "ddp/flat"], ["'ddp/flat'", "bucket only"]),
    "one node, distributed": (["--nodes", "1"], ["nodes 1", "--mode single"]),
    "a rate that is no rate": (["--rate", "fast"], ["'fast'", "200mbit"]),
    "a batch that does not divide": (["--batch", "10"], ["batch 10", "8 or 12"]),
    "both ways to say batch": (["--batch", "8", "--batch-per-rank", "2"], ["--batch 8", "--batch-per-rank 2"]),
    "steps that leave nothing": (["--steps", "2"], ["steps 2", "--steps 3"]),
    "a number that is none": (["--steps", "many"], ["steps", "'many'"]),
    "an unknown key": (["--set", "optimiser.lr=1"], ["'optimiser'", "optimizer"]),
    "an unknown key of one node": (["--set", "overrides.node2.rate=50mbit"], ["'overrides.node2.rate'", "cpus, link"]),
    "a setting without value": (["--set", "seed"], ["'seed'", "KEY=VALUE"]),
    "an unknown substrate": (["--on", "moon"], ["'moon'", "netns"]),
    "a rate on loopback": (["--on", "process", "--rate", "10mbit"], ["10mbit", "--on netns"]),
}


@pytest.mark.parametrize("arguments, words", REFUSALS.values(), ids=REFUSALS.keys())
def test_bad_input_is_refused_with_value_and_way_out_and_creates_nothing(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TestbedError) as refusal:
        main.app(["run", "--data", "synthetic", *arguments], standalone_mode=False)
    assert refusal.value.exit_code == UsageError.exit_code
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert list(tmp_path.iterdir()) == []


RESUMABLE = {*OF_SLURM, "--on", "--inventory", "--accept-new", "--share", "--retries", "--json", "--resume"}


def test_options_that_a_resumed_run_would_ignore_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = ["--out", "y", "--mode", "ring", "--steps", "200", "--set", "checkpoint=5"]  # ring is the default, too
    with pytest.raises(SpecError, match=r"'--mode, --steps, --set, --out': .*keeps its spec.*start a new run without"):
        main.app(["run", "--resume", "r", *wanted], standalone_mode=False)
    for flag in flags_of("run") - RESUMABLE:
        value = [] if flag in ("--profile", "--keep-going", "--dry-run") else ["1"]
        with pytest.raises(SpecError, match=rf"--resume with '{flag}'"):
            main.app(["run", "--resume", "r", flag, *value], standalone_mode=False)


def test_options_about_the_substrate_and_retries_are_accepted_with_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = ["--on", "hosts", "--inventory", "i", "--accept-new", "--share", "--retries", "2", "--json"]
    with pytest.raises(UsageError, match=r"r: has no spec\.json, so it is no run folder"):
        main.app(["run", "--resume", "r", *taken], standalone_mode=False)


def test_missing_data_is_refused_before_anything_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(TestbedError, match=r"testbed data get cifar10.*synthetic") as refusal:
        main.app(["run", "--on", "process"], standalone_mode=False)
    assert refusal.value.exit_code == UsageError.exit_code
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_that_is_missing_or_broken_is_refused_by_name(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("title = [")
    for path in (tmp_path / "missing.toml", broken):
        with pytest.raises(SpecError, match=path.name):
            main.app(["sweep", str(path)], standalone_mode=False)


def test_settings_reach_the_spec_with_their_types():
    flags = {"mode": "ring", "nodes": "4", "rate": "200mbit", "seed": None}
    spec = spec_from_flags(flags, ["optimizer.lr=0.1", "probe=false", "data.shares=[1, 2, 3, 2]", "batch=8"])
    assert (spec.optimizer.lr, spec.probe, spec.data.shares, spec.batch) == (0.1, False, (1, 2, 3, 2), 8)
    assert spec.link.rate == 200_000_000


def test_modes_as_json_lists_every_legal_mode_once():
    result = CliRunner().invoke(main.app, ["modes", "--json"])
    modes = [row["mode"] for row in json.loads(result.stdout)]
    assert {"single", "gather", "allreduce", "ring", "ring-reduce", "tree", "halving", "server", "ddp"} <= set(modes)
    assert len(modes) == len(set(modes))
    taken = {row["mode"]: row["codecs"] for row in json.loads(result.stdout)}
    assert "int8" in taken["direct"] and "int8" not in taken["ring"] and "fp16" in taken["ring"]


def test_modes_name_a_method_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def mean_(buffer, group)\n")
    (tmp_path / "ring.py").write_text("def mean_(buffer, group): ...\n")
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(main.app, ["modes", *flags])
        assert f"{tmp_path / 'broken.py'} cannot be used: line 1: expected ':'. Fix the file." in result.stderr
        assert f"{tmp_path / 'ring.py'} cannot be used: ring is a built-in mode. Rename the file." in result.stderr
        assert "broken" not in result.stdout


def test_modes_list_every_k_where_it_can_follow():
    rows = json.loads(CliRunner().invoke(main.app, ["modes", "--json"]).stdout)
    every = {row["mode"]: row["every"] for row in rows}
    assert every["ring"] == every["allreduce/flat"] == ["every:4", "every:4@100"]
    assert every["ddp"] == every["server"] == every["ring/bucket:5MiB/overlap"] == []
    lines = CliRunner().invoke(main.app, ["modes"]).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("/every")] == ["/every:4", "/every:4@100"]


def test_modes_as_text_lists_each_codec_once_with_the_algorithms_that_take_it():
    lines = CliRunner().invoke(main.app, ["modes"]).stdout.splitlines()
    for word, takers in (
        ("/int8", "allowed after direct"),
        ("/topk:0.01", "allowed after direct"),
        ("/fp16", "allowed after gather, allreduce"),
    ):
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{word} ")]
        assert lines[at + 1].strip().startswith(takers)


def test_doctor_prints_one_finding_per_line():
    result = CliRunner().invoke(main.app, ["doctor", "--json"])
    findings = {row["what"]: row for row in json.loads(result.stdout)}
    assert findings["Python 3.11 or later"]["ok"]
    assert all(row["fix"] for row in findings.values() if not row["ok"])


def test_help_shows_defaults_where_keys_are_listed_and_what_a_batch_is() -> None:
    said = " ".join(CliRunner().invoke(main.app, ["run", "--help"]).stdout.split())
    for words in ("[default: 256]", "testbed/spec/run.py", "TESTBED_INVENTORY", "images per step of each rank"):
        assert words in said
    assert "ALGORITHM[/CODEC]" in CliRunner().invoke(main.app, ["tune", "--help"]).stdout


def test_an_error_of_the_machine_outside_of_any_run_is_a_sentence_and_no_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    run = ["run", "--on", "process", "--data", "synthetic", "--out", str(tmp_path / "file" / "r")]
    done = subprocess.run([sys.executable, "-m", "testbed.control", *run], capture_output=True, text=True, timeout=60)
    assert done.returncode == TestbedError.exit_code and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith(f"testbed: {tmp_path / 'file'}") and "try again" in done.stderr


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["modes", "--json"], 0, ""),
        (["run", "--mode", "rong"], 2, "testbed: --mode 'rong'"),
        (["nothing"], 2, "No such command"),
    ],
)
def test_a_command_line_has_an_exit_code_and_one_sentence(argv, code, words):
    done = subprocess.run([sys.executable, "-m", "testbed.control", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
