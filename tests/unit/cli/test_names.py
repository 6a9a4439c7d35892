"""The help names what a site needs; everything else has the word `research` before it."""

from pathlib import Path

import pytest

from amp_ray.cli import MODULES, RESEARCH
from support.commands import Run

COST_MODEL = ("plan", "score", "sweep", "report", "export")


def names(text: str) -> set[str]:
    """Return the names of the commands in a help text."""
    lines = text.partition("Commands:\n")[2].splitlines()
    return {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}


def test_help_shows_what_a_site_needs(amp_ray: Run) -> None:
    shown = amp_ray("--help").out
    assert names(shown) == {*MODULES, "research"} - {"slices"}
    assert "..." not in shown.partition("Commands:")[2]  # whole sentences
    assert names(amp_ray("research", "--help").out) == set(RESEARCH)


@pytest.mark.parametrize("name", COST_MODEL)
def test_only_research_shows_the_cost_model(amp_ray: Run, name: str) -> None:
    assert "--cost-model" not in amp_ray(name, "--help").out
    assert "--cost-model" in amp_ray("research", name, "--help").out


@pytest.mark.parametrize("words", [("plan", "--cost-model", "amp-ray"), ("slices",)])
def test_commands_work_with_and_without_the_word(
    amp_ray: Run, small: Path, words: tuple[str, ...]
) -> None:
    name, *options = words
    first, second = (
        amp_ray(*word, name, small, *options, "--json").json for word in ((), ("research",))
    )
    key = "ranking" if name == "plan" else "slices"
    assert first[key] == second[key] != []


@pytest.mark.parametrize("name", MODULES)
def test_help_fits_into_80_columns(
    amp_ray: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, amp_ray(name, "--help").out.splitlines())) <= 80
