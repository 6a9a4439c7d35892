"""A browser opens the report from disk: it draws itself, without an error and without a network."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_ray as amp
from support.experiments import SMALL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 180

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")

Dom = Callable[[Path], str]


@pytest.fixture
def dom(tmp_path: Path) -> Dom:
    """Return a page as the browser has drawn it; what its console complains about is a failure."""

    def draw(path: Path) -> str:
        assert CHROMIUM is not None
        argv = [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--disable-dev-shm-usage", "--virtual-time-budget=10000", "--enable-logging=stderr"),
            *("--dump-dom", path.as_uri()),
        ]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
        return ended.stdout

    return draw


def shown(dom: str) -> set[str]:
    """Return the sections that a page shows."""
    sections = re.findall(r'<section id="(\w+)"( hidden="")?>', dom)
    return {name for name, hidden in sections if not hidden}


def test_a_plan_is_drawn(tmp_path: Path, dom: Dom) -> None:
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    experiment.write_text(f"{SMALL}recompute: auto\n", encoding="utf-8")
    amp.write_report(experiment, page)
    drawn = dom(page)
    assert {"summary", "commands", "memory", "timeline", "candidates", "cluster"} <= shown(drawn)
    assert drawn.count("<tr") >= 17
    assert drawn.count('class="main-svg"') >= 2
    assert "16 of 16 candidates" in drawn


def test_a_study_is_drawn(tmp_path: Path, dom: Dom) -> None:
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    experiment.write_text(SMALL, encoding="utf-8")
    table = tmp_path / "table.csv"
    lines = ["tp,pp,dp,micro_batch_size,measured_s", "1,1,4,1,oom", "1,2,2,1,0.06", "2,1,2,1,0.05"]
    table.write_text("\n".join(lines), encoding="utf-8")
    amp.tune(experiment, replay=table, budget=3, study=tmp_path / "study")
    amp.write_report(tmp_path / "study", page)
    drawn = dom(page)
    assert {"measured", "budget", "failed", "timeline", "candidates"} <= shown(drawn)
    assert "oom" in drawn
