"""`make test` runs everything whatever fails; its programs are stand-ins here."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = """\
#!/bin/sh
echo "$@" >> calls
case "$*" in
  *"$FAILING"*) exit 1;;
  *tests/hosts*) echo "7 skipped: no sshd" >> "$AMP_RAY_LEFT_OUT";;
esac
"""
EXTRAS = "dev"


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """The Makefile with an environment that is made already."""
    shutil.copy(repository / "Makefile", tmp_path)
    (tmp_path / "tests/net/files").mkdir(parents=True)
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for name in ("python", "lint-imports"):
        (bin_folder / name).write_text(PROGRAM, encoding="utf-8")
        (bin_folder / name).chmod(0o755)
    (tmp_path / ".venv" / ".core").write_text(f"{tmp_path}\n", encoding="utf-8")
    (tmp_path / ".venv" / ".installed").write_text(f"{tmp_path} {EXTRAS}\n", encoding="utf-8")
    return tmp_path


def make_test(folder: Path, failing: str) -> tuple[int, list[str], str]:
    """Run it with one program that fails; return status, what was called, and the output."""
    done = subprocess.run(
        ["make", "test", f"EXTRAS={EXTRAS}"],  # noqa: S607 - whichever make is there
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "FAILING": failing},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    calls = (folder / "calls").read_text(encoding="utf-8").splitlines()
    return done.returncode, calls, done.stdout


@pytest.mark.parametrize(
    ("failing", "named"),
    [
        ("mypy", "lint-types"),
        ("--ignore=tests/hosts", "test-unit"),
        ("loadfile tests/integration", "test-integration"),
    ],
)
def test_every_suite_runs_though_one_fails(checkout: Path, failing: str, named: str) -> None:
    status, calls, output = make_test(checkout, failing)
    assert status != 0
    assert f"== failed: {named} ==" in output
    for part in ("ruff check", "ruff format", "mypy", "--ignore=tests", "loadfile tests/hosts"):
        assert any(part in call for call in calls), (part, calls)


def test_the_end_says_what_was_left_out(checkout: Path) -> None:
    status, _, output = make_test(checkout, "nothing fails")
    assert status == 0, output
    assert output.endswith("== left out ==\n7 skipped: no sshd\n== all passed ==\n")
