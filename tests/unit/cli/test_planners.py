"""Planners by name: those of this package, and one that another package adds."""

import sys
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.search.planner import BUILT_IN, load_planner, make_planner, planner_names
from support.commands import Run
from support.experiments import small_experiment

PACKAGE = Path(__file__).parents[2] / "lib/planner_package"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a planner, as an installer leaves it on the path."""
    about = tmp_path / "rule_of_thumb-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rule-of-thumb\nVersion: 1.0\n")
    entry = "[amp_ray.planners]\nrule-of-thumb = rule_of_thumb:RuleOfThumb\n"
    (about / "entry_points.txt").write_text(entry)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(PACKAGE), *sys.path])


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_planner_of_this_package_is_loaded_by_its_name(name: str) -> None:
    assert load_planner(name).traits is not None


def test_an_unknown_name_is_refused_with_those_that_there_are(installed: None) -> None:
    with pytest.raises(InputError, match=r"no planner has the name 'best'.*rule-of-thumb"):
        make_planner(small_experiment(), "best")


def test_another_package_adds_a_planner(installed: None, amp_ray: Run, small: Path) -> None:
    assert planner_names() == (*BUILT_IN, "rule-of-thumb")
    ended = amp_ray("plan", small, "--cost-model", "rule-of-thumb", "--json")
    assert (ended.code, ended.json["cost_model"]) == (0, "rule-of-thumb")
    exact = amp_ray("plan", small, "--json").json
    [first, *_] = ended.json["ranking"]
    assert first["strategy"]["tp"] == max(row["strategy"]["tp"] for row in exact["ranking"])
    assert first["iteration_time_s"] >= exact["ranking"][0]["iteration_time_s"]
    assert first["memory_bytes"] is not None


def test_a_score_by_another_package_is_its_own(
    installed: None, amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    keys = ("tp", "pp", "dp", "micro_batch_size")
    best = amp_ray("plan", small, "--json").json["ranking"][0]["strategy"]
    table = tmp_path / "strategies.csv"
    table.write_text(f"{','.join(keys)}\n{','.join(str(best[key]) for key in keys)}\n")
    scores = [
        amp_ray("score", small, "--strategies", table, "--cost-model", name, "--json").json
        for name in ("amp-ray", "rule-of-thumb")
    ]
    assert scores[0] == scores[1]


def test_an_unknown_planner_is_bad_input(installed: None, amp_ray: Run, small: Path) -> None:
    ended = amp_ray("plan", small, "--cost-model", "best")
    assert ended.code == 2
    assert "rule-of-thumb" in ended.err


def test_the_experiment_names_its_planner_and_the_command_line_wins(
    installed: None, amp_ray: Run, small: Path
) -> None:
    text = small.read_text(encoding="utf-8")
    small.write_text(f"{text}search: {{planner: rule-of-thumb}}\n", encoding="utf-8")
    for options, name in (((), "rule-of-thumb"), (("--cost-model", "amp-ray"), "amp-ray")):
        assert amp_ray("plan", small, "--json", *options).json["cost_model"] == name
    swept = amp_ray("sweep", small, "--json", "--set", "global_batch_size=8,16").json
    assert swept["cost_model"] == "rule-of-thumb"


def test_an_unknown_planner_of_an_experiment_is_refused_at_its_place(
    amp_ray: Run, small: Path
) -> None:
    for command in (("plan",), ("sweep", "--set", "global_batch_size=8,16")):
        ended = amp_ray(command[0], small, *command[1:], "--set", "search.planner=best")
        assert ended.code == 2
        assert "search.planner: no planner has the name 'best'; known: amp-ray" in ended.err
