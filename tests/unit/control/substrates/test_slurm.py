"""Slurm without a cluster: argument lists, options, what squeue, sinfo and scontrol print, and the job's script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from testbed.control.runs import select
from testbed.control.substrates import slurm
from testbed.control.substrates.slurm import Job, SlurmOptions
from testbed.spec.errors import Interrupted, SpecError, Unavailable
from testbed.spec.run import RunSpec


def test_options_become_single_arguments_after_our_own() -> None:
    options = SlurmOptions(partition="a b; rm", account="x", time="01:00:00", options=["mem=8G", "exclusive"])
    assert slurm.submit_argv(options, nodes=4, cpus=2) == [
        *("sbatch", "--parsable", "--job-name=testbed", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=2"),
        *("--output=/dev/null", "--chdir=/", "--no-requeue"),
        *("--partition=a b; rm", "--account=x", "--time=01:00:00", "--mem=8G", "--exclusive"),
    ]


def test_a_step_is_one_task_per_node_of_the_job() -> None:
    assert slurm.step_argv("12", ["n1", "n2"], "name", 3) == [
        *("srun", "--jobid=12", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2"),
        *("--cpus-per-task=3", "--job-name=name", "--input=none", "--chdir=/", "--mpi=none"),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["wrap=x"], "'wrap' is not allowed"),
        (["export=ALL"], "'export' is not allowed"),
        (["output=/etc/passwd"], "'output' is not allowed"),
        (["constrain=ib"], "Did you mean constraint"),
        (["mem"], "mem needs a value"),
        (["exclusive=user"], "exclusive takes no value"),
        (["comment=x"], "not allowed"),
        (["mem=1\n#SBATCH"], "must be printable"),
        ([f"mem={'9' * 1001}"], "at most 1000"),
        (["--mem=1"], "not allowed"),
        (["cpus-per-task=8"], "as many CPUs as it has threads. Use --set threads=K"),
    ],
)
def test_an_option_outside_the_list_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        SlurmOptions(options=options)


@pytest.mark.parametrize("name", ["partition", "account", "time", "python"])
def test_a_value_with_a_control_character_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"--{name} .* must be printable"):
        SlurmOptions(**{name: "a\x1b[2J"})


def test_a_path_of_a_python_is_absolute_and_its_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun starts it in the folder /; a virtual environment is found by the link to its interpreter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    assert SlurmOptions(python="bin/python").interpreter == str(tmp_path / "bin/python")
    assert SlurmOptions(python="/opt/python").interpreter == "/opt/python"
    assert SlurmOptions(python="python3.12").interpreter == "python3.12"
    assert SlurmOptions().interpreter == sys.executable
    with pytest.raises(SpecError, match=r"--python '-x': srun would take it for an option. Write \./ before it"):
        SlurmOptions(python="-x")


def test_a_dry_run_inside_an_allocation_shows_no_job_that_would_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = slurm.describe(SlurmOptions(), RunSpec(), 4, 1)
    assert outside.startswith("sbatch ") and "--jobid=JOB " in outside
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    inside = slurm.describe(SlurmOptions(), RunSpec(), 4, 1)
    assert inside.startswith("# inside Slurm job 12: nothing is submitted\n")
    assert "sbatch" not in inside and "srun --jobid=12 " in inside


def test_only_listed_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    found = slurm.variables()
    assert found["SLURM_CONF"] == "/etc/slurm.conf" and not {"HF_TOKEN", "SLURM_NTASKS"} & set(found)


def test_the_state_of_a_job_is_parsed() -> None:
    line = "12|PENDING||debug|30:00|2030-01-01T00:00:00|ReqNodeNotAvail, UnavailableNodes:n[0-3]|x\n"
    assert slurm.parse_job("12", f"11|RUNNING|n0|a|1:00|N/A|None\n{line}") == Job(
        id="12",
        state="PENDING",
        partition="debug",
        limit="30:00",
        start="2030-01-01T00:00:00",
        reason="ReqNodeNotAvail, UnavailableNodes:n[0-3]|x",
    )
    assert slurm.parse_job("12", "").state == slurm.GONE


@pytest.mark.parametrize(
    ("reason", "state"), [("TimeLimit", "TIMEOUT"), ("NodeDown", "NODE_FAIL"), ("None", "COMPLETING")]
)
def test_a_job_that_is_being_ended_has_its_reason(reason: str, state: str) -> None:
    assert slurm.parse_job("12", f"12|COMPLETING|n0|debug|30:00|N/A|{reason}\n").state == state


def test_a_time_limit_is_told_while_the_processes_of_the_job_still_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KillWait and an epilog may take minutes."""
    reservation = scripted(tmp_path, monkeypatch, squeue='echo "7|COMPLETING|n[0-1]|p|5:00|N/A|TimeLimit"')
    reservation.job = "7"
    began = time.monotonic()
    lost = reservation.lost("n1", by_signal=True)
    assert lost is not None and str(lost) == "Slurm job 7 reached its time limit of 5:00"
    assert time.monotonic() - began < slurm.END_TIMEOUT_S / 2


def test_a_failed_node_is_named_while_only_the_other_nodes_of_the_job_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = 'case "$*" in *n1*) echo n1 down* ;; esac; echo n0 completing'
    squeue = 'echo "7|COMPLETING|n0|p|5:00|N/A|NodeDown"'
    reservation = scripted(tmp_path, monkeypatch, squeue=squeue, sinfo=sinfo)
    reservation.job, reservation.names = "7", ["n0", "n1"]
    assert str(reservation.lost("n0", by_signal=True)) == "Slurm job 7 lost a node that failed (n1)"


def test_inside_a_task_of_a_job_array_its_nodes_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_JOB_ID is its number. squeue prints that for %A only; for %i it prints the number of the array."""
    row = 'case "$*" in *%A*) id=12 ;; *) id=9_1 ;; esac; echo "$id|RUNNING|n[0-1]|p|5:00|N/A|None"'
    reservation = scripted(tmp_path, monkeypatch, squeue=row)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with reservation.hold(print):
        assert (reservation.job, reservation.names) == ("12", ["n0", "n1"])
    text = "9_1.batch|batch\n9_1.4|testbed-7-0\n"
    assert slurm.parse_steps(text) == {"testbed-7-0": "9_1.4"}, "scancel takes this form"


def test_steps_nodes_and_addresses_are_parsed() -> None:
    steps = "12.batch|batch\n12.extern|extern\n12.4|testbed-7-0\n12.5|bash\n"  # the last one is the user's own
    assert slurm.parse_steps(steps) == {"testbed-7-0": "12.4"}
    assert slurm.parse_down("n0 idle\nn1 down*\nn2 mixed*\nn3 allocated\nn1 down*\n") == "n1, n2"
    text = "NodeName=n0 Arch=x86_64 NodeAddr=10.0.0.1 OS=Linux 6.1 #1 SMP\nNodeName=n1 NodeAddr=n1.lan State=IDLE\n"
    assert slurm.parse_addresses(text) == {"n0": "10.0.0.1", "n1": "n1.lan"}


@pytest.mark.parametrize(
    ("state", "words"),
    {
        "TIMEOUT": "reached its time limit of 5:00",
        "PREEMPTED": "was preempted",
        "CANCELLED": "was cancelled",
        "OUT_OF_MEMORY": "more memory",
        "FAILED": "ended with state FAILED (why)",
        slurm.GONE: "no longer exists",
    }.items(),
)
def test_how_a_job_ended_is_one_sentence_with_its_id(state: str, words: str) -> None:
    error = slurm.how_it_ended(Job(id="12", state=state, limit="5:00", reason="why"))
    assert str(error).startswith("Slurm job 12 ") and words in str(error) and error.way_out


def test_the_exit_code_of_srun_is_that_of_its_task() -> None:
    assert [slurm.task_code(code) for code in (0, 3, 137, 143, 255)] == [0, 3, -9, -15, 255]


def test_a_survey_names_every_node_that_lacks_something() -> None:
    there = {"interface": "eth0", "address": "10.0.0.1", "problem": "", "port": 29500, "busy": "", "missing": []}
    rows = [there | {"node": "n0"}, there | {"node": "n1", "missing": ["/x/.r.shared"]}]
    rows.append(there | {"node": "n2", "problem": "no route to n0 (unreachable)"})
    output = "\n".join(["srun: hello", *map(json.dumps, rows)])
    assert slurm.parse_survey(json.dumps(rows[0]), ["n0"], {})[0]["port"] == 29500
    with pytest.raises(Unavailable) as caught:
        slurm.parse_survey(output, ["n0", "n1", "n2", "n3"], {"/x/.r.shared": "/x"})
    for words in ("n3 did not answer", "n1 does not see /x,", "n2: no route to n0"):
        assert words in str(caught.value)


def test_a_machine_without_sbatch_refuses_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="the command sbatch is missing"):
        select.select("slurm", [RunSpec()])
    with pytest.raises(SpecError, match="--time: is for Slurm only"):
        select.select("process", [RunSpec()], slurm=SlurmOptions(time="5"))


def test_auto_never_takes_slurm() -> None:
    assert "slurm" not in select.SUBSTRATES


def tools(folder: Path, **scripts: str) -> dict[str, str]:
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}


def test_a_job_without_steps_ends_by_itself(tmp_path: Path) -> None:
    """With a step it goes on; Slurm's own steps do not count; a squeue that fails changes nothing."""
    looks = 'n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n; echo 12.batch; [ "$n" = 1 ] && exit 1'
    looks += '; [ "$n" -ge 3 ] || echo 12.0; exit 0'
    env = tools(tmp_path, squeue=looks, sleep=":")
    done = subprocess.run(["sh"], input=slurm.JOB_SCRIPT, text=True, env=env, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and int((tmp_path / "n").read_text()) == 3 + 12, "12 looks of 10 s without a step"


def test_a_job_whose_node_cannot_ask_squeue_ends_after_ten_minutes(tmp_path: Path) -> None:
    env = tools(tmp_path, squeue="echo x >>looks; exit 1", sleep=":")
    done = subprocess.run(["sh"], input=slurm.JOB_SCRIPT, text=True, env=env, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and len((tmp_path / "looks").read_text().split()) == 60


def test_a_step_on_such_a_node_keeps_the_job(tmp_path: Path) -> None:
    """Slurm gives the process that holds a step this name. The step ends at the 80th look."""
    step = ["bash", "-c", "exec -a 'slurmstepd: [12.0]' sleep 60"]
    with subprocess.Popen(step) as process:
        squeue = f"echo x >>looks; [ $(wc -l <looks) -lt 80 ] || kill {process.pid} 2>/dev/null; exit 1"
        env = tools(tmp_path, squeue=squeue, sleep="command -p sleep 0.01")
        done = subprocess.run(["sh"], input=slurm.JOB_SCRIPT, text=True, env=env, cwd=tmp_path, timeout=60)
        process.kill()
    looks = len((tmp_path / "looks").read_text().split())
    assert done.returncode == 0 and 79 + 60 <= looks <= 82 + 60, looks


def test_a_job_that_waits_is_reported_with_its_reason_and_cancelled_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 'echo x >>looks; [ $(wc -l <looks) -lt 3 ] && echo "7|PENDING||p|5:00|N/A|Priority" || '
    rows += 'echo "7|RUNNING|n[0-1]|p|5:00|N/A|None"'
    reservation = scripted(
        tmp_path, monkeypatch, squeue=rows, sbatch="cat >script; echo 7", scancel='echo "$@" >>ended'
    )
    said: list[str] = []
    with reservation.hold(said.append):
        assert reservation.names == ["n0", "n1"] and not Path("ended").exists()
        names = {reservation.job_name}
    with reservation.hold(said.append):
        names.add(reservation.job_name)
    assert said[:2] == ["Slurm job 7 waits in partition p: Priority", "Slurm job 7 has n0, n1"]
    assert Path("ended").read_text() == "7\n7\n" and Path("script").read_text() == slurm.JOB_SCRIPT
    assert len(names) == 2 and all(re.fullmatch(r"testbed-[0-9a-f]{8}", name) for name in names)


RUNNING = 'echo "7|RUNNING|n[0-1]|p|5:00|N/A|None"'


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> slurm.Reservation:
    """A reservation of two nodes by commands of the test's own, outside of any allocation, in this folder."""
    usual = {"sbatch": "echo 7", "squeue": RUNNING, "scontrol": "echo n0 n1"}
    for name, value in tools(folder, **(usual | scripts)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.chdir(folder)
    return slurm.Reservation(SlurmOptions(), nodes=2, cpus=1)


def test_ctrl_c_waits_until_the_job_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with another thread in this process, e.g. that of the progress: the kernel may give it the signal."""
    scancel = f"kill -INT {os.getpid()}; sleep 0.3; echo $1 >>ended"
    reservation = scripted(tmp_path, monkeypatch, scancel=scancel)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), reservation.hold(print):
            pass
    finally:
        done.set()
        other.join()
    assert Path("ended").read_text() == "7\n" and reservation.job == ""


def test_a_job_that_cannot_be_cancelled_is_named_with_the_command_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reservation = scripted(tmp_path, monkeypatch, scancel="echo slurmctld is away >&2; exit 1")
    with reservation.hold(print):
        pass
    assert caplog.messages == ["Slurm job 7 is not cancelled (slurmctld is away). End it: scancel 7"]
    interrupt = f"[ -e interrupted ] || {{ touch interrupted; kill -INT {os.getpid()}; }}"
    waits = f'echo "7|PENDING||p|5:00|N/A|Priority"; {interrupt}'
    reservation = scripted(tmp_path, monkeypatch, squeue=waits, scancel="exit 1")
    with pytest.raises(Interrupted, match=r"waiting for Slurm; job 7 is not cancelled .* End it: scancel 7"):
        reservation.hold(print).__enter__()


@pytest.mark.parametrize("squeue", ["exit 0", 'echo "7|COMPLETED||p|5:00|N/A|None"', "echo Invalid job id >&2; exit 1"])
def test_a_job_that_has_ended_needs_not_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, squeue: str
) -> None:
    reservation = scripted(tmp_path, monkeypatch, scancel="exit 1")
    with reservation.hold(print):
        tools(tmp_path, squeue=squeue)
    assert caplog.messages == []


def test_what_an_sbatch_without_an_answer_has_submitted_is_cancelled_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 0.5)
    submit = "for word; do case $word in --job-name=*) echo ${word#*=} >name;; esac; done; exec sleep 60"
    reservation = scripted(tmp_path, monkeypatch, sbatch=submit, scancel='echo "$@" >>ended')
    with pytest.raises(Unavailable, match=r"sbatch has not answered in 0.5 s"):
        reservation.hold(print).__enter__()
    name = Path("name").read_text().strip()
    assert name.startswith("testbed-") and Path("ended").read_text() == f"--name={name}\n"
    assert f"scancel --name={name}" in caplog.text


@pytest.mark.parametrize(
    ("srun", "by_signal", "failed"), [("exit 1", True, True), ("exit 0", True, False), ("exit 1", False, False)]
)
def test_a_node_whose_task_a_signal_ended_has_failed_if_it_takes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, by_signal: bool, failed: bool
) -> None:
    env = tools(
        tmp_path, squeue='echo "7|RUNNING|n[0-1]|p|5:00|N/A|None"', sinfo="echo n0 idle; echo n1 idle", srun=srun
    )
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    reservation = slurm.Reservation(SlurmOptions(), nodes=2, cpus=1)
    reservation.job = "7"
    lost = reservation.lost("n1", by_signal=by_signal)
    assert (lost is not None and "lost a node that failed (n1)" in str(lost)) == failed
