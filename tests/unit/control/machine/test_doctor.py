"""The doctor's findings: each has a fix if something is missing."""

from __future__ import annotations

import pytest

from testbed.control.machine.doctor import examine, root_finding


@pytest.mark.parametrize(("containers", "instead"), [(True, "in containers"), (False, "plain processes on loopback")])
def test_without_root_the_finding_names_the_substrate_that_is_used(containers: bool, instead: str) -> None:
    finding = root_finding(root=False, containers=containers)
    assert not finding.ok and instead in finding.found and finding.fix == "run as root"
    assert root_finding(root=True, containers=containers).ok


def test_every_finding_has_a_different_subject_and_a_missing_one_has_a_fix() -> None:
    findings = examine()
    assert len({finding.what for finding in findings}) == len(findings)
    assert [finding for finding in findings if not finding.ok and not finding.fix] == []
    assert findings[0].what == "Python 3.11 or later" and findings[0].ok
