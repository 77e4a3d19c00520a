"""The output of a script: bounded, with its end; the line that says why it ended."""

from __future__ import annotations

import io
import os
import threading

from testbed.attach.output import TAIL_BYTES, Output, exceptions, last_words, lost_another

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
