"""A browser opens the report from disk: it draws itself, without an error and without a network."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_ray as amp
from support.browser import drawn, needs_browser
from support.experiments import SMALL

pytestmark = needs_browser

Dom = Callable[[Path], str]


@pytest.fixture
def dom(tmp_path: Path) -> Dom:
    """Return a page as the browser has drawn it."""
    return lambda path: drawn(path.as_uri(), tmp_path / "profile")


def shown(dom: str) -> set[str]:
    """Return the sections that a page shows."""
    sections = re.findall(r'<section id="(\w+)"( hidden="")?>', dom)
    return {name for name, hidden in sections if not hidden}


def test_a_plan_is_drawn(tmp_path: Path, dom: Dom) -> None:
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    experiment.write_text(f"{SMALL}recompute: auto\n", encoding="utf-8")
    amp.write_report(experiment, page)
    page_drawn = dom(page)
    assert {"summary", "commands", "memory", "timeline", "candidates", "cluster"} <= shown(
        page_drawn
    )
    assert page_drawn.count("<tr") >= 17
    assert page_drawn.count('class="main-svg"') >= 2
    assert "16 of 16 candidates" in page_drawn


def test_a_study_is_drawn(tmp_path: Path, dom: Dom) -> None:
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    experiment.write_text(SMALL, encoding="utf-8")
    table = tmp_path / "table.csv"
    lines = ["tp,pp,dp,micro_batch_size,measured_s", "1,1,4,1,oom", "1,2,2,1,0.06", "2,1,2,1,0.05"]
    table.write_text("\n".join(lines), encoding="utf-8")
    amp.tune(experiment, replay=table, budget=3, study=tmp_path / "study")
    amp.write_report(tmp_path / "study", page)
    page_drawn = dom(page)
    assert {"measured", "budget", "failed", "timeline", "candidates"} <= shown(page_drawn)
    assert "oom" in page_drawn
