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
from amp_ray.inputs.section import is_section, keys_of
from amp_ray.runtimes.traits import RUNTIMES
from support.browser import drawn, needs_browser, opened

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
        if isinstance(kind, type) and is_section(kind) and kind.__module__ == module.__name__
    ]
    assert len(sections) > 10
    assert {key for each in sections for key in keys_of(each)} <= words("experiment-file.html")
    assert set(CATALOGUE) <= words("devices.html")
    assert set(RUNTIMES) <= words("runtimes.html")
    text = (site / "commands.html").read_text(encoding="utf-8")
    missing = [name for name in commands.names if f"amp-ray {name} [OPTIONS]" not in text]
    assert missing == []
    assert "amp-ray research slices [OPTIONS]" in text


@needs_browser
def test_search_answers_from_disk(site: Path, tmp_path: Path) -> None:
    page = drawn(f"{(site / 'index.html').as_uri()}?q=reshard_after_forward", tmp_path / "profile")
    results = page.partition('class="md-search-result__list"')[2]
    assert "formats.html?h=reshard_after_forward#strategies" in results


CONTRASTS = """
(() => {
  document.head.append(Object.assign(document.createElement("style"), {
    textContent: "* {transition: none !important}"}));
  const parse = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3]));
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    if (!node) return [255, 255, 255];
    const colour = parse(getComputedStyle(node).backgroundColor);
    return colour[3] === 1 ? colour : over(colour, behind(node.parentElement));
  };
  const least = {};
  for (const node of document.querySelectorAll("body *")) {
    const has_text = [...node.childNodes].some((part) => part.nodeType === 3 && part.data.trim());
    const is_hidden = !node.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!has_text || is_hidden || node.closest("script, style, noscript")) continue;
    const back = behind(node), ink = over(parse(getComputedStyle(node).color), back);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    const name = `${node.tagName} ${node.className}`;
    least[name] = Math.min((high + 0.05) / (low + 0.05), least[name] ?? 99);
  }
  return least;
})()
"""
"""Script that returns the least contrast of visible text and background, by element and class."""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_and_commands_of_the_front_page_are_whole(
    site: Path, tmp_path: Path, scheme: str
) -> None:
    for name in ("index", "api", "experiment-file"):
        with opened((site / f"{name}.html").as_uri(), tmp_path / name, scheme) as page:
            contrasts = page.value(CONTRASTS)
            assert len(contrasts) > 10
            poor = {node: ratio for node, ratio in contrasts.items() if ratio < 4.5}
            assert poor == {}, name
            if name == "index":
                page.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=360,
                    height=800,
                    deviceScaleFactor=1,
                    mobile=True,
                )
                codes = "[...document.querySelectorAll('pre > code')]"
                assert page.value(f"{codes}.map(x => x.scrollWidth - x.clientWidth)") == [0, 0]


def test_what_is_not_there_stops_the_build(repository: Path) -> None:
    hooks = ModuleType("hooks")
    hooks.__file__ = str(repository / "docs" / "hooks.py")
    exec(Path(hooks.__file__).read_text(encoding="utf-8"), vars(hooks))  # noqa: S102 - our own
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="faq.md"))
    link = hooks.on_page_markdown("[steps](../CONTRIBUTING.md)", page, None, None)
    assert link == "steps (`CONTRIBUTING.md`)"
    with pytest.raises(PluginError, match=r"faq\.md: there is no \.\./gone\.md"):
        hooks.on_page_markdown("[gone](../gone.md)", page, None, None)
