import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from amp_ray.inputs import profile, strategies
from amp_ray.inputs.cluster_section import NodeSection
from amp_ray.inputs.experiment_file import ExperimentFile
from amp_ray.inputs.hostfile import parse_hostfile
from amp_ray.inputs.section import Section, validate
from amp_ray.inputs.yaml_text import parse_yaml


def keys() -> Iterator[tuple[type[Section], str]]:
    for module in (profile, strategies):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section:
                yield from ((kind, key) for key in kind.model_fields)


@pytest.fixture(scope="module")
def documentation(repository: Path) -> str:
    return (repository / "docs" / "formats.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def documented(documentation: str) -> set[str]:
    """The words in backquotes of the tables' first columns."""
    rows = [line.split("|")[1] for line in documentation.splitlines() if line.startswith("| `")]
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(("section", "key"), list(keys()))
def test_every_key_is_documented(section: type[BaseModel], key: str, documented: set[str]) -> None:
    assert key in documented, f"docs/formats.md lacks {key} of {section.__name__}"


def blocks(documentation: str, language: str) -> list[str]:
    fences = documentation.split("```")[1::2]
    return [
        text for first, _, text in (block.partition("\n") for block in fences) if first == language
    ]


@pytest.fixture(scope="module")
def of_experiments(repository: Path) -> str:
    """The page whose tables are made from the code; tests/integration/docs builds it."""
    return (repository / "docs" / "experiment-file.md").read_text(encoding="utf-8")


def test_the_documented_experiment_is_one(of_experiments: str) -> None:
    text = blocks(of_experiments, "yaml")[0]
    assert validate(ExperimentFile, parse_yaml(text, file="example.yaml")).name == "example"


def test_the_documented_device_is_one(of_experiments: str) -> None:
    (text,) = (block for block in blocks(of_experiments, "yaml") if block.startswith("device:"))
    rest = {"slots": 1, "intra_gbit_per_s": 1, "inter_gbit_per_s": 1}
    assert NodeSection.model_validate(yaml.safe_load(text) | rest).count == 1


def test_the_documented_hostfile_is_one(documentation: str) -> None:
    (text,) = (block for block in blocks(documentation, "") if "worker-1 slots=8" in block)
    assert [entry.num_slots for entry in parse_hostfile(text)] == [8, 8, 4]
