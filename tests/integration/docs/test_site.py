"""The documents become a site without a warning; it opens from disk and needs no network."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from amp_ray.cli import commands
from amp_ray.clusters.device import CATALOGUE
from amp_ray.inputs import cluster_section, experiment, experiment_file, model_shape
from amp_ray.inputs.section import Section, is_section, keys_of
from amp_ray.runtimes.traits import RUNTIMES
from support.browser import drawn, needs_browser

LIMIT_S = 600


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it; a broken link is an error."""
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    done = subprocess.run(
        argv, cwd=repository, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_loads_only_what_lies_beside_it(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = re.compile(
        r"<(?:script|img|iframe|source|audio|video)\b[^>]*?\bsrc=[\"']?([^\"' >]+)"
        r"|<link\b[^>]*?\brel=[\"']?(?:stylesheet|icon|pre\w+)[^>]*?\bhref=[\"']?([^\"' >]+)"
    )
    for page in pages:
        found = [a or b for a, b in loads.findall(page.read_text(encoding="utf-8"))]
        assert found, page
        base = site if page.name == "404.html" else page.parent
        for target in found:
            assert "//" not in target, f"{page}: {target}"
            assert (base / target.lstrip("/")).is_file(), f"{page}: {target}"
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?:[^)]*\)|@import", sheet.read_text("utf-8")) == []


def test_the_reference_names_what_the_code_has(site: Path) -> None:
    def words(page: str) -> set[str]:
        return set(re.findall(r"<code>([^<]+)</code>", (site / page).read_text(encoding="utf-8")))

    sections = [
        kind
        for module in (cluster_section, experiment, experiment_file, model_shape)
        for kind in vars(module).values()
        if isinstance(kind, type) and is_section(kind) and kind is not Section
    ]
    assert len(sections) > 10
    assert {key for each in sections for key in keys_of(each)} <= words("experiment-file.html")
    assert set(CATALOGUE) <= words("devices.html")
    assert set(RUNTIMES) <= words("runtimes.html")
    text = (site / "commands.html").read_text(encoding="utf-8")
    assert [name for name in commands.commands if f"amp-ray {name} [OPTIONS]" not in text] == []


@needs_browser
def test_search_answers_from_disk(site: Path, tmp_path: Path) -> None:
    page = drawn(f"{(site / 'index.html').as_uri()}?q=reshard_after_forward", tmp_path / "profile")
    results = page.partition('class="md-search-result__list"')[2]
    assert "formats.html?h=reshard_after_forward#strategies" in results


def test_what_is_not_there_stops_the_build(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = ModuleType("hooks")
    hooks.__file__ = str(repository / "docs" / "hooks.py")
    exec(Path(hooks.__file__).read_text(encoding="utf-8"), vars(hooks))  # noqa: S102 - our own
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="faq.md"))
    link = hooks.on_page_markdown("[steps](../CONTRIBUTING.md)", page, None, None)
    assert link == "steps (`CONTRIBUTING.md`)"
    with pytest.raises(PluginError, match=r"faq\.md: there is no \.\./gone\.md"):
        hooks.on_page_markdown("[gone](../gone.md)", page, None, None)
    line = "::: keys NodeSection"
    table = hooks.on_page_markdown(line, page, None, None)
    assert "| `slots` | count | needed | Devices per node" in table
    monkeypatch.setattr(hooks, "_texts", lambda _: {"slots": "Devices."})
    with pytest.raises(PluginError, match="NodeSection: no text below count, device"):
        hooks.on_page_markdown(line, page, None, None)
