import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import BuiltIn, Experiment, OwnProgram
from amp_ray.runtime.launch.program_files import program_files, source_files, user_files
from support.experiments import small_experiment


def with_files(*names: str) -> Experiment:
    """The small experiment with a program of one's own."""
    plain = small_experiment()
    program = OwnProgram(argv=("python3",), metric="helper", files=names)
    return replace(plain, trials=replace(plain.trials, program=program))


def test_the_training_program_travels_as_source() -> None:
    files = source_files()
    assert {"amp_ray/__init__.py", "amp_ray/training/__main__.py"} <= files.keys()
    assert "amp_ray/training/profiling/run.py" in files
    assert all(name.startswith("amp_ray/") and name.endswith(".py") for name in files)
    assert b"__version__" in files["amp_ray/__init__.py"]


def test_nothing_but_the_training_program_travels() -> None:
    runtime = {name for name in source_files() if name.startswith("amp_ray/runtime")}
    assert runtime == {"amp_ray/runtime/__init__.py", "amp_ray/runtime/whole_file.py"}


def test_a_users_files_keep_their_names_in_the_trials_folder(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/model.py").write_bytes(b"model")
    (tmp_path / "train.py").write_bytes(b"\xff")
    names = ["lib/model.py", str(tmp_path / "train.py")]
    assert user_files(with_files(*names), tmp_path) == {
        "lib/model.py": b"model",
        "train.py": b"\xff",
    }


def test_a_file_beside_the_folder_loses_its_way_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"")
    (tmp_path / "here").mkdir()
    assert user_files(with_files("../train.py"), tmp_path / "here") == {"train.py": b""}


def test_two_files_that_would_be_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"")
    with pytest.raises(InputError, match=r"would be 'train\.py' in the trial's folder"):
        user_files(with_files("train.py", str(tmp_path / "train.py")), tmp_path)


@pytest.mark.parametrize("name", ["missing.py", ".."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be read|names no file"):
        user_files(with_files(name), tmp_path)


@pytest.mark.parametrize(("metric", "travels"), [("helper", True), ("megatron", False)])
def test_the_metrics_module_travels_where_it_is_the_metric(
    tmp_path: Path, metric: BuiltIn, *, travels: bool
) -> None:
    (tmp_path / "train.py").write_bytes(b"own")
    program = OwnProgram(argv=("python3", "train.py"), metric=metric, files=("train.py",))
    plain = small_experiment()
    experiment = replace(plain, trials=replace(plain.trials, program=program))
    files = program_files(experiment, tmp_path)
    assert files["train.py"] == b"own"
    assert ("amp_ray_metric.py" in files) is travels


def test_without_an_own_program_ours_travels(tmp_path: Path) -> None:
    assert program_files(small_experiment(), tmp_path) == source_files()


def test_whatever_a_sent_file_imports_of_this_package_is_sent_too() -> None:
    files = source_files()
    for path, source in files.items():
        for module in imported(ast.parse(source)):
            name = module.replace(".", "/")
            assert {f"{name}.py", f"{name}/__init__.py"} & files.keys(), f"{path}: {module}"


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules of this package that a program imports when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("amp_ray."):
            yield str(child.module)
        if isinstance(child, ast.ImportFrom) and child.module == "amp_ray":
            yield from (f"amp_ray.{alias.name}" for alias in child.names)
        yield from imported(child)
