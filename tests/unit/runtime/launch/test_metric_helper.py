import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amp_ray.trials.own_program.metrics import read_told

SOURCE = Path("amp_ray") / "runtime" / "launch" / "metric_helper.py"


@pytest.fixture
def helper(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module as a rank of a trial has it: fresh, with the variables of its launch."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AMP_RAY_RANKS_PER_STAGE", raising=False)
    monkeypatch.setenv("AMP_RAY_FOLDER", str(tmp_path))
    monkeypatch.setenv("AMP_RAY_TRIAL_ID", "t")
    monkeypatch.setenv("WORLD_SIZE", "4")
    spec = importlib.util.spec_from_file_location("amp_ray_metric", repository / SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What is written at the end of the test run belongs to no trial.
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module.atexit, "register", lambda *call: at_exit.append(call))
    vars(module)["at_exit"] = at_exit
    import_torch(module, None)
    return module


def import_torch(helper: ModuleType, torch: object) -> None:
    """Have the program import a torch; it is no business of the process that runs the tests."""
    modules = {} if torch is None else {"torch": torch}
    vars(helper)["sys"] = SimpleNamespace(modules=modules)


def record(folder: Path, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"metric-rank-{rank}.json").read_bytes())
    return content


def test_times_are_written_as_the_reader_wants_them(helper: ModuleType, tmp_path: Path) -> None:
    helper.report_iteration_times([3, 1.5, 2.0])
    data = (tmp_path / "metric-rank-0.json").read_bytes()
    measurement = read_told({"metric-rank-0.json": data}, "t", num_warmup_steps=1)
    assert measurement.step_time_s == (3.0, 1.5, 2.0)
    assert record(tmp_path)["num_ranks"] == 4


def test_reporting_all_times_again_replaces_them(helper: ModuleType, tmp_path: Path) -> None:
    helper.report_step(9.0)
    helper.report_iteration_times([1.0])
    helper.report_iteration_times(value for value in (2.0, 3.0))
    assert record(tmp_path)["step_s"] == [2.0, 3.0]


def test_single_steps_are_written_when_asked_for(helper: ModuleType, tmp_path: Path) -> None:
    helper.report_step(1.0)
    assert record(tmp_path)["step_s"] is None  # there will be more
    helper.report_step(2.0)
    helper.save()
    assert record(tmp_path)["step_s"] == [1.0, 2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metric-rank-0.json"]


def test_single_steps_are_written_at_exit_by_the_process_that_told_them(
    helper: ModuleType, tmp_path: Path
) -> None:
    helper.report_step(1.0)
    helper.report_step(2.0)
    ((save, pid),) = helper.at_exit
    save(pid + 1)
    assert record(tmp_path)["step_s"] is None
    save(pid)
    assert record(tmp_path)["step_s"] == [1.0, 2.0]


def test_a_step_is_measured(
    helper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(helper.time, "perf_counter", lambda: next(clock))
    with helper.step():
        pass
    helper.save()
    assert record(tmp_path)["step_s"] == [2.5]


def test_a_step_that_raises_does_not_count(helper: ModuleType, tmp_path: Path) -> None:
    def fail() -> None:
        message = "no"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError), helper.step():
        fail()
    helper.save()
    assert record(tmp_path)["step_s"] == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, None, 4)),
        ({"RANK": "3", "NODE_RANK": "1", "NUM_NODES": "2"}, (3, None, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "NODE_RANK": "1"}, (2, None, 4)),
        ({"NODE_RANK": "1", "NUM_NODES": "2"}, (1, None, 2)),
        ({"RANK": "1", "AMP_RAY_RANKS_PER_STAGE": "2"}, (1, 0, 4)),
        ({"RANK": "2", "AMP_RAY_RANKS_PER_STAGE": "2"}, (2, 1, 4)),
    ],
)
def test_rank_stage_and_number_of_files_follow_from_the_launchers_variables(
    helper: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    expected: tuple[int, int | None, int],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    helper.save()
    written = record(tmp_path, expected[0])
    assert (written["rank"], written["stage"], written["num_files"]) == expected


def test_a_program_may_name_its_stage(
    helper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_RAY_RANKS_PER_STAGE", "2")
    helper.set_stage(3)
    helper.save()
    assert record(tmp_path)["stage"] == 3


@pytest.mark.parametrize("name", ["AMP_RAY_FOLDER", "AMP_RAY_TRIAL_ID"])
def test_outside_a_trial_nothing_is_written(
    helper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    helper.report_iteration_times([1.0])
    assert list(tmp_path.iterdir()) == []


class FakeCuda(SimpleNamespace):
    """A device in use, which notes that it was waited for."""

    calls: int = 0

    def is_initialized(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.calls += 1

    def max_memory_allocated(self) -> int:
        return 12345


def test_a_device_in_use_is_waited_for_and_its_peak_told(
    helper: ModuleType, tmp_path: Path
) -> None:
    cuda = FakeCuda()
    import_torch(helper, SimpleNamespace(cuda=cuda))
    with helper.step():
        assert cuda.calls == 1
    assert cuda.calls == 2
    helper.save()
    assert record(tmp_path)["peak_memory_bytes"] == 12345


@pytest.mark.parametrize(
    "torch", [SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace(is_initialized=bool))]
)
def test_without_a_device_in_use_there_is_no_peak(
    helper: ModuleType, tmp_path: Path, torch: object
) -> None:
    import_torch(helper, torch)
    with helper.step():
        pass
    helper.save()
    assert record(tmp_path)["peak_memory_bytes"] is None


def run(repository: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports the module, as in a trial's folder."""
    (folder / "amp_ray_metric.py").write_bytes((repository / SOURCE).read_bytes())
    variables = {"AMP_RAY_FOLDER": str(folder), "AMP_RAY_TRIAL_ID": "t", "RANK": "0"}
    return subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_single_steps_are_written_at_the_end_of_the_program(
    repository: Path, tmp_path: Path
) -> None:
    program = "import amp_ray_metric\nfor n in (1, 2): amp_ray_metric.report_step(n)"
    ended = run(repository, tmp_path, program)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert record(tmp_path)["step_s"] == [1.0, 2.0]


def test_a_program_whose_times_cannot_be_written_at_its_end_fails(
    repository: Path, tmp_path: Path
) -> None:
    program = (
        "import amp_ray_metric, os\n"
        "amp_ray_metric.report_step(1)\n"
        "os.environ['AMP_RAY_FOLDER'] += '/that/is/gone'"
    )
    ended = run(repository, tmp_path, program)
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr


def test_a_forked_child_does_not_write_its_parents_times(repository: Path, tmp_path: Path) -> None:
    program = (
        "import amp_ray_metric, os, sys\n"
        "amp_ray_metric.report_step(1)\n"
        "if os.fork() == 0: amp_ray_metric._times.append(7.0); sys.exit()\n"
        "path = os.environ['AMP_RAY_FOLDER'] + '/metric-rank-0.json'\n"
        "os.wait(); print('\"step_s\": null' in open(path).read())"
    )
    ended = run(repository, tmp_path, program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    assert record(tmp_path)["step_s"] == [1.0]


def test_it_imports_nothing_that_hosts_may_lack(repository: Path, tmp_path: Path) -> None:
    program = "import amp_ray_metric; print(amp_ray_metric.__name__)"
    assert run(repository, tmp_path, program).stdout == "amp_ray_metric\n"
    tree = ast.parse((repository / SOURCE).read_text(encoding="utf-8"), feature_version=(3, 8))
    nodes = list(ast.walk(tree))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules <= sys.stdlib_module_names | {"collections.abc"}
