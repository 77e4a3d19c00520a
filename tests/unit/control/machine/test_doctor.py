"""The doctor's findings: each has a fix if something is missing."""

from __future__ import annotations

import pytest

from testbed.control.machine.doctor import examine, namespaces_finding


@pytest.mark.parametrize(("containers", "instead"), [(True, "in containers"), (False, "plain processes on loopback")])
def test_without_namespaces_the_finding_names_the_substrate_that_is_used(containers: bool, instead: str) -> None:
    finding = namespaces_finding("they are forbidden. As root: sysctl -w x=1", "", containers)
    assert not finding.ok and finding.found.startswith("no: they are forbidden; ") and instead in finding.found
    assert finding.fix == "As root: sysctl -w x=1"
    assert namespaces_finding("", "works, as root", containers).ok


def test_every_finding_has_a_different_subject_and_a_missing_one_has_a_fix() -> None:
    findings = examine()
    assert len({finding.what for finding in findings}) == len(findings)
    assert [finding for finding in findings if not finding.ok and not finding.fix] == []
    assert findings[0].what == "Python 3.11 or later" and findings[0].ok
