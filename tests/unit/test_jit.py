import hashlib
import os
import pickle
import subprocess
from pathlib import Path

import pytest

import amp_ray
from support.programs import python

NOBODY = 65534

# Loads a kernel from its cache, or compiles it, in a process of its own; tells which, and where.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from plain import twice
assert twice(4) == 8
hits = sum(twice.stats.cache_hits.values())
print(hits, twice.stats.cache_path)
"""
SOURCE = """
from amp_ray.jit import kept

@kept()
def twice(number):
    return 2 * number
"""
PAIRS = """
from typing import NamedTuple

class Pair(NamedTuple):
    first: int
"""
SOURCE_OF_PAIRS = """
from amp_ray.jit import kept
from {module} import Pair

@kept()
def doubled(pair):
    return 2 * pair.first

class twice:
    stats = doubled.stats
    def __new__(cls, number):
        return doubled(Pair(number))
"""


class Installed:
    """A module with a kernel, and a user who runs it."""

    def __init__(self, folder: Path, user: int = 0) -> None:
        self.package, self.home, self._user = folder / "package", folder / "home", user
        self.package.mkdir()
        (self.package / "plain.py").write_text(SOURCE, encoding="ascii")
        self.home.mkdir(mode=0o700)
        os.chown(self.home, user, user)

    @property
    def cache(self) -> Path:
        return self.package / "__pycache__"

    def run(self, **environment: str) -> tuple[bool, str, str]:
        """Tell whether the kernel was loaded, where it is kept, and what was said about that."""
        variables = {"HOME": str(self.home), "PATH": os.environ["PATH"], **environment}
        ended = python("-B", "-c", PROGRAM, self.package, env=variables, user=self._user)
        hits, _, place = ended.stdout.strip().partition(" ")
        return hits != "0", place, ended.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    if os.geteuid():
        pytest.skip("only root can give files to another user")
    return Installed(tmp_path)


def test_a_users_own_package_keeps_its_kernels_beside_it(installed: Installed) -> None:
    place = str(installed.cache)
    assert [installed.run() for _ in range(2)] == [(False, place, ""), (True, place, "")]


def test_a_cache_of_another_user_is_not_run(installed: Installed) -> None:
    installed.run()
    os.chown(installed.cache, NOBODY, NOBODY)
    is_loaded, place, remark = installed.run()
    assert not is_loaded
    assert Path(place).is_relative_to(installed.home / ".cache" / "amp-ray")
    assert f"{installed.cache} belongs to another user" in remark
    assert f"kept in {installed.home}/.cache/amp-ray" in remark
    assert installed.run()[:2] == (True, place)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_cache_that_others_may_write_to_is_not_run(installed: Installed, what: str) -> None:
    installed.run()
    (file,) = installed.cache.glob("*.nbc")
    (installed.cache if what == "folder" else file).chmod(0o777)
    is_loaded, place, remark = installed.run()
    assert not is_loaded
    assert Path(place).is_relative_to(installed.home)
    assert "every user may write to" in remark


def test_a_shared_folder_for_kernels_is_not_used(installed: Installed, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert str(shared) not in installed.run(NUMBA_CACHE_DIR=str(shared))[1]
    shared.chmod(0o755)
    assert str(shared) in installed.run(NUMBA_CACHE_DIR=str(shared))[1]


def test_where_no_folder_is_safe_kernels_are_compiled_in_memory(installed: Installed) -> None:
    installed.run()
    installed.cache.chmod(0o777)
    installed.home.chmod(0o777)
    is_loaded, place, remark = installed.run()
    assert (is_loaded, place) == (False, "None")
    assert "compiled in memory, at every start" in remark


def test_nothing_is_compiled_where_that_is_switched_off() -> None:
    program = "from amp_ray.partition.kernels import count_stages; print(type(count_stages))"
    ended = python("-c", program, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
    assert ended.stdout == "<class 'function'>\n"


def test_a_cache_that_names_a_module_which_is_gone_is_made_anew(installed: Installed) -> None:
    (installed.package / "pairs.py").write_text(PAIRS, encoding="ascii")
    kernel = installed.package / "plain.py"
    kernel.write_text(SOURCE_OF_PAIRS.format(module="pairs"), encoding="ascii")
    assert installed.run() == (False, str(installed.cache), "")
    assert installed.run()[0]
    (installed.package / "pairs.py").rename(installed.package / "couples.py")
    kernel.write_text(SOURCE_OF_PAIRS.format(module="couples"), encoding="ascii")
    assert installed.run() == (False, str(installed.cache), "")
    assert installed.run()[0]


@pytest.mark.parametrize("damage", [b"", b"middle", "folder", "pickle"])
def test_a_damaged_kernel_is_compiled_anew(installed: Installed, damage: bytes | str) -> None:
    installed.run()
    (file,) = installed.cache.glob("*.nbc")
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "pickle":  # of this source, with a right digest, and no kernel
        source, pickled = data[:32], pickle.dumps(3)
        file.write_bytes(source + hashlib.sha256(source + pickled).digest() + pickled)
    else:
        file.write_bytes(data[:1000] + bytes(2000) + data[3000:] if damage else b"")
    is_loaded, place, remark = installed.run()
    assert (is_loaded, place) == (False, str(installed.cache))
    assert remark.count("\n") == 1
    assert f"in {installed.cache} cannot be used, and is compiled anew: " in remark
    if damage != "folder":
        assert installed.run() == (True, place, "")


@pytest.mark.parametrize("mode", ["ro", "size=4k"])
def test_kernels_are_compiled_where_nothing_can_be_kept(installed: Installed, mode: str) -> None:
    disk = installed.home / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", mode, "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        assert not installed.run(NUMBA_CACHE_DIR=str(disk))[0]
        assert not any(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)  # noqa: S607


SETTINGS = """
import sys
sys.path.append("")
import amp_ray.partition.kernels, numba
print(numba.config.DISABLE_JIT, "cuda" in sys.modules)
"""


def test_the_current_folder_does_not_configure_numba(tmp_path: Path) -> None:
    (tmp_path / ".numba_config.yaml").write_text("disable_jit: 1\ncuda_use_nvidia_binding: 1\n")
    (tmp_path / "cuda.py").touch()
    ended = python("-P", "-c", SETTINGS, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("0 False\n", "")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path, workers: str) -> None:
    for name in ("yaml", "numpy", "logging", "numba", "cuda"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    top = Path(amp_ray.__file__).parents[1]
    command = ("plan", top / "experiments" / "demo.yaml", "--workers", workers, "--json")
    variables = {**os.environ, "PYTHONPATH": str(top)}
    assert not python("-m", "amp_ray", *command, cwd=tmp_path, env=variables).stderr


HANGING = """
import os, signal, subprocess, sys, time
import amp_ray.jit as jit
jit.MOST_WAIT_S = 1.0
start = subprocess.Popen
subprocess.Popen = lambda argv, **rest: start(["sleep", "600"], **rest)
os.cpu_count = lambda: 2
jit.compile_beside("amp_ray.partition.kernels")
process = jit._beside["amp_ray.partition.kernels"]
import numpy as np
from amp_ray.partition import kernels
states = np.zeros(2, np.int64)
waits = []
process.wait, wait = lambda *limits: waits.append(limits) or wait(*limits), process.wait
kernels.count_stages(states[:1], states[1:], states, states)
kernels.least_chain_s(np.zeros((2, 1)), states[:1], 1, (0.0, 0.0), 1)
print(waits, process.poll())
"""


def test_a_process_that_does_not_end_is_awaited_once_and_killed() -> None:
    ended = python("-c", HANGING)
    assert ended.stdout == "[(1.0,), ()] -9\n", ended.stderr


# Compiles in a process beside this one; tells what this one compiled itself, and what was logged.
BESIDE = """
import logging
from amp_ray.jit import COMPILING, compile_beside
class Said(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
COMPILING.addHandler(Said())
COMPILING.setLevel("INFO")
if {beside}:
    compile_beside("amp_ray.partition.kernels")
import numpy as np
from amp_ray.partition import kernels
states = np.zeros(2, np.int64)
kernels.count_stages(states[:1], states[1:], states, states)
print(sum(kernels.count_stages.stats.cache_misses.values()))
"""


def test_kernels_compiled_by_another_process_are_loaded_when_they_are_called(
    tmp_path: Path,
) -> None:
    def run(*, beside: bool) -> list[str]:
        variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return python("-c", BESIDE.format(beside=beside), env=variables).stdout.splitlines()

    assert run(beside=True) == ["0"]
    (tmp_path / next(tmp_path.iterdir())).rename(tmp_path / "moved")
    message = "compiling, once after an installation: about five seconds"
    assert run(beside=False) == [message, "1"]
    assert run(beside=False) == ["0"]
