import sys
from pathlib import Path
from types import ModuleType

import pytest

from amp_ray.__main__ import main
from amp_ray.cli.exits import BAD_INPUT, INTERRUPTED


class Interrupted(ModuleType):
    """A module during whose import somebody presses Ctrl-C."""

    def __getattr__(self, name: str) -> object:
        """Press it."""
        if name == "main":
            raise KeyboardInterrupt
        raise AttributeError(name)


def test_an_interruption_while_it_starts_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "amp_ray.cli", Interrupted("amp_ray.cli"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED
    assert capsys.readouterr().err == "amp-ray: interrupted\n"


def test_it_runs_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["amp-ray", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out


def test_a_removed_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == BAD_INPUT
    assert capsys.readouterr().err.startswith("amp-ray: the current folder has been removed")
