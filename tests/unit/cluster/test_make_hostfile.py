import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from click.testing import CliRunner, Result

from amp_ray.errors import AmpRayError

RunMain = Callable[..., Result]


def record(number: int, *, gpus: int = 4) -> dict[str, Any]:
    address = f"10.0.0.{number}"
    resources = {f"node:{address}": 1.0, "GPU": float(gpus), "accelerator_type:T4": 1.0}
    if number == 1:
        resources["node:__internal_head__"] = 1.0
    return {"Alive": True, "NodeManagerAddress": address, "Resources": resources}


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_hostfile")


@pytest.fixture
def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunMain:
    """Run the program on a cluster of so many nodes; errors come out as they are."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def run_with(num_nodes: int, *arguments: str) -> Result:
        nodes = [record(number) for number in range(num_nodes, 0, -1)]
        monkeypatch.setattr(
            script, "nodes_of", lambda _address: contextlib.nullcontext(lambda: nodes)
        )
        result = CliRunner().invoke(
            script.make_hostfile, ["--timeout", "0", *arguments], standalone_mode=False
        )
        if result.exception is not None:
            raise result.exception
        return result

    return run_with


def bootstrap(home: Path, num_workers: int) -> None:
    """Leave behind what ``ray up`` leaves on the head."""
    types = {"head": {"min_workers": 0}, "worker": {"min_workers": num_workers}}
    text = json.dumps({"cluster_name": "a", "available_node_types": types})
    (home / "ray_bootstrap_config.yaml").write_text(text, encoding="utf-8")


def test_the_hostfile_is_printed_alone_and_the_count_beside_it(run: RunMain) -> None:
    result = run(2)
    assert result.stdout == "10.0.0.1 slots=4\n10.0.0.2 slots=4\n"
    assert result.stderr == "2 nodes alive; 2 hosts, 8 slots\n"


def test_the_hostfile_is_written_where_asked(run: RunMain, tmp_path: Path) -> None:
    output = tmp_path / "hosts"
    result = run(1, "--output", str(output), "--slots", "2")
    assert output.read_text(encoding="utf-8") == "10.0.0.1 slots=2\n"
    assert result.stdout == ""


def test_as_many_nodes_are_expected_as_ray_up_was_to_start(run: RunMain, tmp_path: Path) -> None:
    bootstrap(tmp_path, num_workers=3)
    with pytest.raises(AmpRayError, match="3 of 4 nodes are alive"):
        run(3)
    assert run(4).stdout.count("\n") == 4


def test_a_number_of_nodes_that_is_given_counts(run: RunMain, tmp_path: Path) -> None:
    bootstrap(tmp_path, num_workers=3)
    assert run(3, "--expect", "3").stdout.count("\n") == 3


def test_no_file_is_written_while_nodes_are_missing(run: RunMain, tmp_path: Path) -> None:
    output = tmp_path / "hosts"
    with pytest.raises(AmpRayError):
        run(1, "--expect", "2", "--output", str(output))
    assert not output.exists()


def test_no_cluster_is_an_error_that_names_its_address(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_options: object) -> None:
        message = "Could not find any running Ray instance."
        raise ConnectionError(message)

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(AmpRayError, match=r"auto.*Could not find"), script.nodes_of("auto"):
        pass
