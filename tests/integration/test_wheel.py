"""Wheels of the package, with and without a C compiler where they are built."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from amp_ray.compiled.lookup import kernel_sources
from support.programs import python

pytest.importorskip("hatchling", reason="needs hatchling (pip install amp-ray[dev])")


def wheel(repository: Path, folder: Path, **variables: str) -> Path:
    """Build a wheel of the files that git knows, and return it."""
    tree, out = folder / "tree", folder / "out"
    tree.mkdir()
    listed = ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others"]
    files = subprocess.run([*listed, "--exclude-standard"], capture_output=True, check=True)
    names = [name for name in files.stdout.decode().split("\0") if (repository / name).is_file()]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((repository / name).read_bytes())
    words = ("wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", out, tree)
    python("-m", "pip", *words, env={**os.environ, **variables}, cwd=folder)
    (made,) = out.iterdir()
    return made


def plan(folder: Path, experiment: Path) -> tuple[str, str]:
    """Plan with the package of a folder, where nothing can be compiled; return what it says."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": "", "CC": "false"}
    environment.pop("AMP_RAY_UNCOMPILED", None)
    ended = python("-P", "-m", "amp_ray", "plan", experiment, "--json", env=environment, cwd=folder)
    return ended.stdout, ended.stderr


def installed(made: Path, folder: Path) -> Path:
    """Unpack a wheel."""
    with ZipFile(made) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.integration
def test_a_wheel_needs_no_compiler_where_it_is_installed(repository: Path, tmp_path: Path) -> None:
    made = wheel(repository, tmp_path)
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{version}-{version}-" in made.name
    folder = installed(made, tmp_path / "installed")
    built = {
        path.name.partition("-")[0] for path in (folder / "amp_ray/compiled/built").glob("*/*")
    }
    assert set(kernel_sources()) < built
    answer, remark = plan(folder, repository / "experiments" / "demo.yaml")
    assert (answer[:1], remark) == ("{", "")


@pytest.mark.integration
def test_without_a_compiler_the_wheel_is_plain_python(repository: Path, tmp_path: Path) -> None:
    made = wheel(repository, tmp_path, CC="false")
    assert made.name.endswith("-py3-none-any.whl")
    folder = installed(made, tmp_path / "installed")
    answer, remark = plan(folder, repository / "experiments" / "demo.yaml")
    assert answer[:1] == "{"
    assert remark.startswith("amp-ray: inner loops run as plain Python, which is slow; ")
    assert remark.count("\n") == 1
