"""What the launcher gives to a script and says of its end. Scripts are started for real in tests/gloo and tests/net."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import pytest

from testbed.attach import channel
from testbed.attach.launch import (
    TAIL_BYTES,
    Output,
    environment,
    exceptions,
    failure,
    in_working_copy,
    last_words,
    lost_another,
    placeholders,
    script_user,
)
from testbed.attach.workplace import Workplace
from testbed.results.receipt import RATE_VARIABLE
from testbed.spec.errors import PeerLost, RankFailed
from testbed.spec.privileges import NOBODY
from testbed.spec.run import RunSpec
from testbed.spec.script import PLACEHOLDERS, ScriptSpec

NODE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
SECRETS = {"SSH_AUTH_SOCK": "/x", "GITHUB_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "TESTBED_DATA": "/d", "MINE": "m"}


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    (tmp_path / "mine").mkdir()
    return Workplace(tmp_path / "mine", (os.geteuid(), os.getegid()))


def spec(**script: object) -> RunSpec:
    values = {"argv": ["python", "main.py"], "folder": "/mine", "path": "/bin"} | script
    return RunSpec.load({"mode": "script", "nodes": 2, "batch_per_rank": 1, "script": values}, "")


def test_the_environment_is_a_list(place: Workplace) -> None:
    with place:
        found = environment(spec(), place, NODE | SECRETS | {"LANG": "C", "PYTHONPATH": "/clone"}, {})
    assert not set(found) & set(SECRETS) and found["LANG"] == "C"
    assert found["PYTHONPATH"] == str(place.python) and found["RANK"] == "1" and found["LOCAL_RANK"] == "0"
    assert found["HOME"] == found["TMPDIR"] == str(place.home)


def test_a_mode_that_chooses_its_bucket_size_knows_the_measured_rate(place: Workplace) -> None:
    values = spec().model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"mode": "ring/pipeline"}
    swapped = RunSpec.load(values, "")
    with place:
        for given, rate in (({}, None), ({RATE_VARIABLE: "25000000.0"}, 25e6)):
            request = environment(swapped, place, NODE | given, {})[channel.REQUEST]
            assert json.loads(request)["rate"] == rate


def test_a_framework_sees_the_node_it_is_on(place: Workplace) -> None:
    with place:
        found = environment(spec(), place, NODE, {})
    assert found["NODE_RANK"] == found["GROUP_RANK"] == NODE["RANK"] and found["ROLE_WORLD_SIZE"] == NODE["WORLD_SIZE"]
    assert "TORCHELASTIC_RUN_ID" in found and "TORCHELASTIC_USE_AGENT_STORE" not in found


def test_variables_are_handed_through(place: Workplace) -> None:
    with place:
        asked = spec(environment={"DEBUG": "1", "PYTHONPATH": "/lib"}, handed=["MINE"])
        found = environment(asked, place, NODE | SECRETS, {})
    assert (found["DEBUG"], found["MINE"]) == ("1", "m") and "GITHUB_TOKEN" not in found
    assert found["PYTHONPATH"] == f"{place.python}{os.pathsep}/lib"


def test_a_method_of_the_users_own_is_in_reach_of_the_script(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mean_(buffer, group): pass")
    with place:
        assert "TESTBED_METHODS" not in environment(spec(), place, NODE | {"TESTBED_METHODS": "/clone"}, {})
        place.put_method(tmp_path / "mine.py")
        found = Path(environment(spec(), place, NODE, {})["TESTBED_METHODS"])
        assert found.is_relative_to(place.root) and (found / "mine.py").is_file()


def test_every_placeholder_has_a_value(place: Workplace) -> None:
    with place:
        found = placeholders(place, NODE)
        assert set(found) == set(PLACEHOLDERS) and Path(found["attach"]).is_file()


def test_root_becomes_the_caller_of_sudo_or_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert script_user({"SUDO_UID": "1000", "SUDO_GID": "100"}) == (1000, 100)
    for variables in ({}, {"SUDO_UID": "0", "SUDO_GID": "0"}, {"SUDO_UID": "x", "SUDO_GID": "1"}):
        assert script_user(variables) == (NOBODY, NOBODY)


def test_a_launcher_in_a_container_is_told_the_user_which_is_never_root() -> None:
    assert script_user({"TESTBED_SCRIPT_USER": "1234:56"}) == (1234, 56)
    assert script_user({"TESTBED_SCRIPT_USER": "0:0"})[0] != 0


def test_a_script_in_the_folder_is_started_from_the_copy() -> None:
    script = ScriptSpec(argv=("python", "/mine/src/main.py", "--out", "/mine/x"), folder="/mine")
    assert in_working_copy(script) == ["python", "src/main.py", "--out", "/mine/x"]


def test_a_failure_has_the_scripts_own_code_and_words() -> None:
    script = ScriptSpec(argv=("python", "main.py"), folder="/mine")
    own = failure(script, {"PATH": "/bin"}, 7, "ValueError: no\n", 1.5)
    assert (own.code, own.script_code, own.message, own.at) == (RankFailed.exit_code, 7, "ValueError: no", 1.5)
    lost = failure(script, {"PATH": "/bin"}, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1\n", 1.5)
    assert (lost.code, lost.script_code) == (PeerLost.exit_code, 1)


def test_an_end_without_a_step_and_a_python_without_torch_are_explained() -> None:
    script = ScriptSpec(argv=("sh", "main.py"), folder="/mine")
    assert "no step of an optimizer" in failure(script, {"PATH": "/bin"}, 0, "done\n", 1.5).message
    message = failure(script, {"PATH": "/bin"}, 1, "ModuleNotFoundError: No module named 'torch'\n", 1.5).message
    assert "the interpreter /bin/sh has no torch. Activate" in message


TRACEBACK = """step 3
[rank1]: Traceback (most recent call last):
[rank1]:   File "main.py", line 9, in <module>
[rank1]:     raise ValueError("no")
[rank1]: ValueError: no
"""
TORCHRUN = """E1118 api.py:882] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
main.py FAILED
"""


def test_the_last_words_are_the_exception() -> None:
    assert last_words(TRACEBACK) == "ValueError: no"
    assert last_words(f"{TRACEBACK}some line that a library prints at its end\n") == "ValueError: no"


def test_an_exception_after_binary_output_is_found() -> None:
    assert last_words("\x00\ufffd" + TRACEBACK.partition("\n")[2]) == "ValueError: no"


def test_torchruns_own_exception_is_not_the_reason() -> None:
    assert last_words(TRACEBACK + TORCHRUN) == "ValueError: no"
    assert len(exceptions(TRACEBACK + TORCHRUN)) == 2


def test_without_an_exception_the_last_line_counts() -> None:
    assert last_words("usage: main.py\nmain.py: error: --rank is required\n\n") == "main.py: error: --rank is required"
    assert last_words("") == ""


def test_words_of_a_rank_that_lost_another() -> None:
    for words in (
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
        "RuntimeError: Gloo connectFullMesh failed with connect timeout",
    ):
        assert lost_another(words)
    assert not lost_another("ValueError: expected 4 ranks, got 2")


def test_a_log_has_a_largest_size_and_the_end_of_the_output() -> None:
    log = io.BytesIO()
    output = Output(log, limit=1000)
    for number in range(100_000):
        output.add(b"%06d\n" % number)
    output.finish()
    written = log.getvalue()
    assert written.startswith(b"000000\n") and written.endswith(b"099999\n")
    assert len(written) < 1000 + TAIL_BYTES + 200 and b"0.7 MB of output" in written.replace(b"700.0 kB", b"0.7 MB")
    assert output.total == 700_000


def test_a_short_output_is_copied_as_it_is() -> None:
    log = io.BytesIO()
    output = Output(log, limit=1000)
    reading, writing = os.pipe()
    copier = threading.Thread(target=output.copy, args=(reading,))
    copier.start()
    os.write(writing, bytes(range(256)))
    os.close(writing)
    copier.join()
    output.finish()
    os.close(reading)
    assert log.getvalue() == bytes(range(256))
