"""Network namespaces without root: what is said where they do not work. tests/net/test_rootless.py makes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testbed.control.machine import user_namespace
from testbed.control.machine.user_namespace import FORBIDDING, explain


@pytest.mark.parametrize(("name", "value", "fix"), FORBIDDING)
def test_a_setting_of_the_kernel_that_forbids_it_is_named_with_the_command_that_allows_it(
    name: str, value: str, fix: str
) -> None:
    others = {other: "1" if unwanted == "0" else "0" for other, unwanted, _ in FORBIDDING}
    said = explain("unshare: unshare failed: Operation not permitted", others | {name: value}, container=True)
    assert f"{name.replace('/', '.')} = {value}" in said and fix in said and "--on process" in said


def test_in_a_container_the_way_to_start_it_is_named() -> None:
    said = explain("mount: permission denied\nunshare: unshare failed: Operation not permitted\n", {}, container=True)
    assert "inside a container: unshare: unshare failed: Operation not permitted" in said and "--privileged" in said


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    said = explain("write failed /proc/self/uid_map: Operation not permitted", {}, container=False)
    assert "write failed /proc/self/uid_map: Operation not permitted" in said and "administers" in said


@pytest.mark.parametrize(("container", "words"), [(True, "with --privileged"), (False, "SYS_ADMIN and NET_ADMIN")])
def test_root_that_may_not_make_namespaces_is_not_told_to_become_root(container: bool, words: str) -> None:
    said = explain("unshare: unshare failed: Operation not permitted", {}, container, root=True)
    assert said.startswith("root may not make network namespaces here (") and "Operation not permitted" in said
    assert words in said and "--on process" in said and "run as root" not in said


def test_root_needs_no_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with user_namespace.held({}):
        assert user_namespace.prefix() == [] and user_namespace.named() == Path("/run/netns")
    assert user_namespace.temporary() == ["unshare", "--net", "--"]


def test_the_folders_of_tc_are_searched_once_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/opt/bin:/sbin")
    assert user_namespace.search_path() == "/opt/bin:/sbin:/usr/sbin"


def test_what_unshare_prints_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = (sys.executable, "-c", "import sys; sys.exit('unshare: not today')")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(user_namespace, "UNSHARE", failing)
    monkeypatch.setattr(user_namespace, "FORBIDDING", ())
    with pytest.raises(user_namespace.Unavailable, match="unshare: not today"):
        user_namespace.check()


def test_a_folder_that_the_namespaces_would_hide_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(user_namespace, "NAMED", tmp_path / "run" / "netns")
    hidden = tmp_path / "run" / "user" / "1000"
    user_namespace.check_visible(tmp_path)
    with pytest.raises(user_namespace.Unavailable, match=r"run/user/1000, which is in /run.*mkdir /run/netns"):
        user_namespace.check_visible(tmp_path, hidden)
    user_namespace.NAMED.mkdir(parents=True)
    user_namespace.check_visible(hidden)


def test_a_keeper_that_does_not_get_ready_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(user_namespace, "UNSHARE", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(user_namespace, "TIMEOUT_S", 0.5)
    with pytest.raises(user_namespace.Unavailable, match="not ready"), user_namespace.held({}):
        pass
