"""The root's conftest.py: what is left out is said, and fails the run in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("number", range(2))
def test_is_skipped(number):
    pytest.skip({reason!r})
"""


def run(repository: Path, folder: Path, reason: str, *, ci: bool) -> tuple[int, str, str]:
    """Run three tests, of which two are skipped; return exit code, output and the report."""
    conftest = (repository / "conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_it.py").write_text(SKIPPING.format(reason=reason), encoding="utf-8")
    report = folder / "report"
    variables = {"AMP_RAY_LEFT_OUT": str(report), "CI": "true" if ci else "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout, report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("reason", "ci", "code"),
    [
        ("no sshd: apt-get install openssh-server", False, 0),
        ("no sshd: apt-get install openssh-server", True, 1),
        ("Metis's profiles, which are not here", True, 0),
    ],
)
def test_reasons_are_said_and_fail_in_ci(
    repository: Path, tmp_path: Path, reason: str, *, ci: bool, code: int
) -> None:
    ended, output, report = run(repository, tmp_path, reason, ci=ci)
    assert ended == code, output
    assert f"2 skipped: {reason}" in output
    assert f"2 skipped: {reason}\n" in report
