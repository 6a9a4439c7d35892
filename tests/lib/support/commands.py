"""Runs commands in this process: fixtures for a conftest.py to import."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest

from amp_ray.cli import main
from support.bad_input import Files, Refused
from support.experiments import SMALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        """The command's output, which must be JSON only."""
        return json.loads(self.out)

    @property
    def without_first_line(self) -> Self:
        """The same, without the line that replayed studies begin with."""
        return replace(self, err=self.err.partition("\n")[2])


Run = Callable[..., Ended]


@pytest.fixture
def amp_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``amp-ray`` in this process, with its output in a pipe, which has no width."""

    def run(*arguments: str | Path, columns: str = "") -> Ended:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr("sys.argv", ["amp-ray", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(code=int(ended.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The small experiment as a file, with everything but tp, dp and pp off."""
    path = tmp_path / "small.yaml"
    off = "recompute: none\nzero_stage: 0\nsearch: {idle_devices: false}\n"
    path.write_text(f"{SMALL}{off}", encoding="utf-8")
    return path


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Run a command on files with mistakes, and check that it refuses them as every command should.

    The files are written into a new folder, in which the command runs. Returns the messages, one
    per mistake.
    """
    monkeypatch.chdir(tmp_path)

    def run(files: Files, *options: str, command: str = "plan", mistakes: int = 1) -> str:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        before = sorted(tmp_path.rglob("*"))
        argv = ["amp-ray", command, "experiment.yaml", *options, "--json", "result.json"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        assert all(line.startswith("amp-ray: ") for line in err.splitlines()), err
        assert len(err.splitlines()) == mistakes, err
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return "\n".join(line.removeprefix("amp-ray: ") for line in err.splitlines())

    return run
