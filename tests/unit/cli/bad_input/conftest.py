"""Runs a command on files that a user got wrong."""

import sys
from pathlib import Path

import pytest

from amp_ray.cli import main
from support.bad_input import Files, Refused


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Run a command on files; return its messages, one per mistake, after the common checks.

    The files are written below an empty folder, in which the command runs.
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
