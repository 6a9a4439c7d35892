import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from amp_ray.compiled import SHARED, UNCOMPILED, is_kernel
from amp_ray.compiled.build import DIRECTIVES, missing_packages
from amp_ray.compiled.lookup import BUILDS, build_folder, kernel_sources
from support.programs import python
from support.uncompiled import uncompiled

needs_compiler = pytest.mark.skipif(
    bool(missing_packages()), reason="needs a C compiler and Python's headers"
)
KERNEL = "amp_ray.partition.kernels"
# Tells which file a kernel was loaded from, and calls it.
PROGRAM = f"""
import numpy as np
import {KERNEL} as kernels
states = np.zeros(2, np.int64)
kernels.count_stages(states[:1], states[1:], states.copy(), states.copy())
print(kernels.__file__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package, compiled as this one is."""
    shutil.copytree(
        BUILDS.parents[1], tmp_path / "amp_ray", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def loaded(package: Path, **variables: str) -> tuple[Path, str]:
    """Return the file that a kernel is loaded from in a process of its own, and what is said."""
    environment = {**os.environ, "PYTHONPATH": str(package), **variables}
    environment.pop(UNCOMPILED, None) if UNCOMPILED not in variables else None
    ended = python("-c", PROGRAM, env=environment, cwd=package)
    return Path(ended.stdout.strip()), ended.stderr


def compile_in(package: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Compile the kernels of a copy."""
    return subprocess.run(
        [sys.executable, "-m", "amp_ray.compiled"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_every_module_named_kernels_is_compiled() -> None:
    sources = kernel_sources()
    assert KERNEL in sources
    assert sources[KERNEL] == BUILDS.parents[1] / "partition" / "kernels.py"
    assert all(map(is_kernel, sources))
    assert not any(map(is_kernel, ("amp_ray", "amp_ray.cost", "kernels", "amp_ray.cost.memory")))
    assert is_kernel("amp_ray.cost.kernels.evaluate")


@needs_compiler
@pytest.mark.skipif(bool(os.environ.get(UNCOMPILED)), reason=f"{UNCOMPILED} is set")
@pytest.mark.parametrize("name", kernel_sources())
def test_kernels_are_loaded_as_they_were_compiled(name: str) -> None:
    file = import_module(name).__file__
    assert file is not None
    assert Path(file).parent == build_folder()
    assert uncompiled(name).__file__ == str(kernel_sources()[name])
    assert import_module(name).__file__ == file


@pytest.mark.parametrize("name", kernel_sources())
def test_every_variable_of_a_kernel_has_a_type_of_c(
    name: str, repository: Path, tmp_path: Path
) -> None:
    """Cython remarks on an index that is a Python object, which is slow."""
    directives = ",".join(f"{key}={value}" for key, value in DIRECTIVES.items())
    words = ("-3", "-X", directives, "--shared", SHARED, "--module-name", name)
    source = kernel_sources()[name]
    done = python("-m", "cython", *words, source, "-o", tmp_path / "kernel.c", cwd=repository)
    assert (done.stdout, done.stderr) == ("", "")


@needs_compiler
def test_a_build_of_other_sources_is_not_used(package: Path) -> None:
    source = package / "amp_ray" / "partition" / "kernels.py"
    file, remark = loaded(package)
    assert (file.parent.parent, remark) == (package / "amp_ray" / "compiled" / "built", "")
    assert loaded(package, **{UNCOMPILED: "1"}) == (source, "")
    before = source.read_text(encoding="utf-8")
    source.write_text(before + "\n# Changed.\n", encoding="utf-8")
    file, remark = loaded(package)
    assert file == source
    assert remark.count("\n") == 1
    assert f"plain Python, which is slow; to compile them: {sys.executable} -m" in remark
    assert compile_in(package).returncode == 0
    again, remark = loaded(package)
    assert (again.parent.parent, remark) == (package / "amp_ray" / "compiled" / "built", "")
    assert len(list(again.parent.parent.iterdir())) == 1
    source.write_text(before, encoding="utf-8")
    assert loaded(package)[0] == source


@pytest.mark.parametrize("which", ["missing", "failing"])
def test_without_a_compiler_everything_runs_as_plain_python(package: Path, which: str) -> None:
    shutil.rmtree(package / "amp_ray" / "compiled" / "built")
    variables = {"PATH": str(package)} if which == "missing" else {"CC": "false"}
    done = compile_in(package, **variables)
    assert done.returncode == 1
    assert "inner loops stay plain Python, which is slow: " in done.stderr
    assert ("gcc libc6-dev" if which == "missing" else "false -shared") in done.stderr
    file, remark = loaded(package, **variables)
    assert file == package / "amp_ray" / "partition" / "kernels.py"
    assert remark.count("\n") == 1
    if which == "missing":
        assert "apt-get install gcc libc6-dev" in remark
    assert loaded(package, **{UNCOMPILED: "1"}, **variables) == (file, "")


def test_the_command_line_says_in_one_line_that_nothing_is_compiled(package: Path) -> None:
    shutil.rmtree(package / "amp_ray" / "compiled" / "built")
    experiment = package / "small.yaml"
    experiment.write_text(
        "name: small\nmodel: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 2, "
        "sequence_length: 64, vocab_size: 128}\n"
        "cluster: {nodes: [{count: 1, device: V100-16, slots: 2, inter_gbit_per_s: 10}]}\n"
        "global_batch_size: 2\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(package)}
    environment.pop(UNCOMPILED, None)
    words = ("-m", "amp_ray", "plan", experiment, "--json")
    ended = python(*words, env=environment, cwd=package)
    assert ended.stderr.startswith("amp-ray: inner loops run as plain Python, which is slow")
    assert ended.stderr.count("\n") == 1
    plain = python(*words, env={**environment, UNCOMPILED: "1"}, cwd=package)
    assert plain.stderr == ""
    answers = [json.loads(text.stdout) for text in (ended, plain)]
    for answer in answers:
        del answer["search_s"]
    assert answers[0] == answers[1]
