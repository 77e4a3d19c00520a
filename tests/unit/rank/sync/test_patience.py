"""Threads that move bytes let the one that computes have its turn."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from testbed.rank.sync.pipeline import GLOO, be_patient, make_gloo_patient


def test_a_thread_is_patient_for_itself_alone() -> None:
    found: list[int] = []

    def work() -> None:
        be_patient()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH] and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_gloos_thread_is_found_by_its_name_and_left_as_it_was() -> None:
    seen: list[int] = []
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO)
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    for patient in (True, False):
        make_gloo_patient(patient)
        seen.append(os.sched_getscheduler(thread.native_id or 0))
    done.set()
    thread.join()
    assert seen == [os.SCHED_BATCH, os.SCHED_OTHER] and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_thread_that_is_gone_is_nobodys_trouble() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    be_patient(thread.native_id or 0)
