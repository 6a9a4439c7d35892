"""What docs/own-program.md says of the code; tests/integration runs its example."""

import ast
import re
from pathlib import Path

import pytest

from amp_ray.inputs.experiment import SECONDS_PER_UNIT
from amp_ray.inputs.placeholders import PLACEHOLDERS
from amp_ray.runtime.launch.metric_helper import FOLDER_VARIABLE, TRIAL_VARIABLE
from amp_ray.trials.own_program.metrics import DEEPSPEED_ENGINE, DEEPSPEED_PIPELINE, MEGATRON
from amp_ray.trials.own_program.program import check_program
from support.experiments import experiment_from

MAX_EXAMPLE_LINES = 32


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    """Return the document."""
    return (repository / "docs" / "own-program.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the code of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_table_of_placeholders_is_complete(text: str) -> None:
    rows = re.findall(r"^\| `\{(\w+)\}` \| (.*) \|$", text, re.MULTILINE)
    assert dict(rows) == PLACEHOLDERS


def test_the_example_is_short_and_parses(text: str) -> None:
    (program,) = blocks(text, "python")
    ast.parse(program)
    assert len(program.splitlines()) <= MAX_EXAMPLE_LINES


def test_the_experiment_of_the_example_is_sound(text: str) -> None:
    experiment = experiment_from(blocks(text, "yaml")[0])
    assert check_program(experiment).metric == "helper"


@pytest.mark.parametrize("index", [1, 2, 3])
def test_what_the_other_snippets_show_is_sound(text: str, index: int) -> None:
    example, *snippets = blocks(text, "yaml")
    assert len(snippets) == 3
    before, _ = example.split("trials:\n")
    check_program(experiment_from(before + snippets[index - 1]))


def test_the_built_in_lines_are_those_that_are_read(text: str) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]*)`", text))
    (line,) = re.findall(r"`(iteration 7/ 25 .*?)`", text.replace("\n", " "))
    assert MEGATRON.pattern.search(line)
    (line,) = re.findall(r"`(steps: 10 .*?)`", text.replace("\n", " "))
    assert DEEPSPEED_PIPELINE.pattern.search(line)
    assert "CurrSamplesPerSec=" in quoted
    assert "CurrSamplesPerSec=" in DEEPSPEED_ENGINE.shown


def test_units_and_variables_are_named(text: str) -> None:
    assert all(f"`{unit}`" in text for unit in SECONDS_PER_UNIT)
    assert f"`{FOLDER_VARIABLE}`" in text
    assert f"`{TRIAL_VARIABLE}`" in text
