"""The software script as it really runs: another interpreter, made-up packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amp_ray.runtime import doctor
from amp_ray.runtime.doctor import software_script
from amp_ray.runtime.hosts.agent import software


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages that comes before all others."""
    return tmp_path / "packages"


def add(folder: Path, name: str, release: str | None, **files: str) -> None:
    """Install a made-up package, with metadata where it has a release."""
    (folder / name).mkdir(parents=True)
    for file, text in {"__init__": "", **files}.items():
        (folder / name / f"{file}.py").write_text(text, encoding="utf-8")
    if release is not None:
        add_metadata(folder, name, release)


def add_metadata(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def probed(packages: Path) -> dict[str, Any]:
    """Run the script without any packages but the made-up ones."""
    argv = [sys.executable, "-S", "-c", software_script()]
    environment = {"PYTHONPATH": str(packages)}
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return facts


def test_nothing_installed_is_found_as_nothing(packages: Path) -> None:
    facts = probed(packages)
    assert facts["kind"] == "software"
    assert facts["version"] == ".".join(map(str, sys.version_info[:3]))
    assert [facts[name] for name in ("torch", "deepspeed", "cuda", "nccl")] == [None] * 4


def test_versions_are_read_without_importing(packages: Path) -> None:
    hurt = "raise SystemExit('imported')"
    version = (
        "from typing import Optional\n__version__ = '2.9.1+cu126'\ncuda: Optional[str] = '12.6'\n"
    )
    add(packages, "torch", "2.9.1", __init__=hurt, version=version)
    add(packages, "deepspeed", "0.19.8", __init__=hurt)
    add_metadata(packages, "nvidia-nccl-cu12", "2.27.5")
    facts = probed(packages)
    assert (facts["torch"], facts["cuda"]) == ("2.9.1+cu126", "12.6")
    assert (facts["deepspeed"], facts["nccl"]) == ("0.19.8", "2.27.5")


def test_a_build_without_cuda_has_none(packages: Path) -> None:
    add(packages, "torch", "2.9.1", version="__version__ = '2.9.1+cpu'\ncuda = None\n")
    facts = probed(packages)
    assert (facts["torch"], facts["cuda"], facts["nccl"]) == ("2.9.1+cpu", None, None)


def test_a_package_without_metadata_is_there_all_the_same(packages: Path) -> None:
    add(packages, "deepspeed", None)
    assert probed(packages)["deepspeed"] == "unknown"


def test_metadata_without_the_package_is_not_a_package(packages: Path) -> None:
    add_metadata(packages, "deepspeed", "0.19.8")
    assert probed(packages)["deepspeed"] is None


def test_too_old_a_python_says_its_version_and_no_more(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "AGENT_PYTHON", (99, 0))
    facts = probed(packages)
    assert facts["kind"] == "old"
    assert facts["version"] == ".".join(map(str, sys.version_info[:3]))


def test_the_script_is_the_module(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(packages, "made_up", "1.0", version="__version__ = '1.0+x'\ncuda = '13.0'\n")
    add_metadata(packages, "nvidia-nccl-cu13", "2.28.1")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(software, "PACKAGES", ("made_up",))
    monkeypatch.setattr("sys.argv", ["-c"])
    assert software.package_folder("made_up") == packages / "made_up"
    assert software.package_folder("made_up.no.such") is None
    assert software.version_lines(packages / "made_up") == {"__version__": "1.0+x", "cuda": "13.0"}
    assert software.version_lines(packages) == {}
    software.main()
    facts = json.loads(capsys.readouterr().out)
    assert (facts["made_up"], facts["executable"]) == ("1.0", sys.executable)
