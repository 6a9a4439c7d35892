"""Output of a command that cannot be written: real processes, real descriptors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import python

FULL = Path("/dev/full")
SECONDS = 600

needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def shell(line: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which ``$1``, ``$2`` ... are files and ``$PY`` is Python."""
    return subprocess.run(
        ["/bin/sh", "-c", line, "sh", *map(str, files)],
        env={**os.environ, "PY": sys.executable},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@needs_full
@pytest.mark.parametrize("more", ["", "--json", "--all"])
def test_a_full_disk_is_one_line(small: Path, more: str) -> None:
    done = shell(f'$PY -m amp_ray plan "$1" {more} > /dev/full', small)
    assert done.stderr == "amp-ray: output cannot be written: No space left on device\n"
    assert done.returncode == 4


@needs_full
def test_a_full_disk_is_told_of_every_command(small: Path, tmp_path: Path) -> None:
    strategies = tmp_path / "mine.csv"
    strategies.write_text("tp,pp,dp,micro_batch_size\n2,2,1,2\n", encoding="utf-8")
    for line in (
        '$PY -m amp_ray score "$1" --strategies "$2" > /dev/full',
        "$PY -m amp_ray --help > /dev/full",
    ):
        done = shell(line, small, strategies)
        assert "output cannot be written: No space left on device" in done.stderr
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)


def test_a_closed_output_is_one_line(small: Path) -> None:
    done = shell('$PY -m amp_ray plan "$1" >&-', small)
    assert done.stderr == "amp-ray: output cannot be written: Bad file descriptor\n"
    assert done.returncode == 4


def test_a_closed_output_does_not_matter_where_nothing_is_written_to_it(
    small: Path, tmp_path: Path
) -> None:
    result = tmp_path / "plan.json"
    done = shell('$PY -m amp_ray plan "$1" --json "$2" >&-', small, result)
    assert (done.returncode, done.stderr) == (0, "")
    assert result.stat().st_size > 0


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_messages_that_nobody_can_read_change_nothing(small: Path, where: str) -> None:
    if "full" in where and not FULL.exists():
        pytest.skip("this system has no /dev/full")
    done = shell(f'$PY -m amp_ray plan "$1" {where}', small)
    assert done.returncode == 0
    assert "s/iter" in done.stdout
    assert shell(f"$PY -m amp_ray plan nothing.yaml {where}").returncode == 2


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_reader_that_has_gone_ends_a_command_quietly(small: Path, more: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "amp_ray", "plan", small, *more.split()],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


DENIED = """
import click
from amp_ray.cli.exits import run_command

def command():
    raise PermissionError(13, "Permission denied", "closed/my.yaml")

run_command(click.Command("command", callback=command))
"""


def test_a_folder_that_nobody_may_enter_is_bad_input() -> None:
    """In place of a real one, which is open to root."""
    done = python("-c", DENIED, code=2)
    assert done.stderr == "amp-ray: closed/my.yaml: Permission denied\n"
