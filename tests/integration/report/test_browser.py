"""A browser opens the report from disk and draws it, without an error and without a network."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_ray as amp
from amp_ray.report.page import page as make_page
from amp_ray.report.page import plan_record
from amp_ray.runtime.planning import plan_experiment
from support.browser import drawn, needs_browser, opened
from support.experiments import SMALL, experiment_from

pytestmark = needs_browser

Dom = Callable[[Path], str]


@pytest.fixture
def dom(tmp_path: Path) -> Dom:
    """Return a function that returns a page's document after the browser has drawn it."""
    return lambda path: drawn(path.as_uri(), tmp_path / "profile")


def shown(dom: str) -> set[str]:
    """Return the sections that a page shows."""
    sections = re.findall(r'<section id="(\w+)"( hidden="")?>', dom)
    return {name for name, hidden in sections if not hidden}


def test_a_plan_is_drawn(tmp_path: Path, dom: Dom) -> None:
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    text = f"{SMALL}recompute: auto\nsearch: {{idle_devices: false}}\n"
    experiment.write_text(text, encoding="utf-8")
    amp.write_report(experiment, page)
    page_drawn = dom(page)
    assert {"summary", "commands", "memory", "timeline", "candidates", "cluster"} <= shown(
        page_drawn
    )
    assert page_drawn.count("<tr") >= 17
    assert page_drawn.count('class="main-svg"') >= 2
    assert "16 of 16 candidates" in page_drawn


@pytest.fixture
def page_of_a_study(tmp_path: Path) -> Path:
    """The report of a study of the small experiment, with a trial that ran out of memory."""
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    experiment.write_text(SMALL, encoding="utf-8")
    table = tmp_path / "table.csv"
    lines = ["tp,pp,dp,micro_batch_size,measured_s", "1,1,4,1,oom", "1,2,2,1,0.06", "2,1,2,1,0.05"]
    table.write_text("\n".join(lines), encoding="utf-8")
    amp.tune(experiment, replay=table, budget=3, study=tmp_path / "study")
    amp.write_report(tmp_path / "study", page)
    return page


def test_a_study_is_drawn(page_of_a_study: Path, dom: Dom) -> None:
    page_drawn = dom(page_of_a_study)
    assert {"measured", "budget", "failed", "timeline", "candidates"} <= shown(page_drawn)
    assert "oom" in page_drawn


def test_markup_in_a_name_is_drawn_as_text(tmp_path: Path) -> None:
    """Without escaping, the charts' library would make a link of it."""
    file, link = tmp_path / "report.html", '<a href="https://example.org">x</a>'
    planned = plan_experiment(experiment_from(SMALL), progress=lambda _done, _all: None)
    record = plan_record(planned, source="small.yaml")
    record["constants"] = [{"name": link, "prior": 1.0, "value": 1.5, "sigma": 0.1}]
    times = {"predicted_s": 1.0, "predicted_sigma": 0.1, "measured_s": 1.0, "mean_s": 1.0}
    outcome: dict[str, object] = {"outcome": "measured", "reason": None, "tells_time": True}
    record["trials"] = [{"number": 0, "id": 0, "warnings": [], **times, **outcome}]
    file.write_text(make_page(record), encoding="utf-8")
    with opened(file.as_uri(), tmp_path / "profile") as page:
        assert page.value("document.querySelectorAll('svg a').length") == 0
        texts = (
            "[...document.querySelectorAll('#constants svg text')].map(each => each.textContent)"
        )
        assert link in page.value(texts)


FAULTS_OF_THE_PAGE = """
() => {
  const faults = [], all = (query) => [...document.querySelectorAll(query)];
  const name = (node) =>
    node.labels?.[0]?.textContent || node.getAttribute("aria-label") || node.textContent;
  let level = 0;
  for (const head of all("h1, h2, h3").filter((each) => each.getClientRects().length)) {
    const next = Number(head.tagName[1]);
    if (next > level + 1) faults.push(`${head.textContent} is no ${head.tagName}`);
    level = next;
  }
  if (all("h1").length !== 1 || all("main").length !== 1) faults.push("h1 or main");
  for (const node of all("button, input, select, [role=region], [role=img], [role=figure]"))
    if (!name(node).trim()) faults.push(`no name: ${node.outerHTML.slice(0, 80)}`);
  for (const node of all("th")) if (!node.scope) faults.push(`no scope: ${node.textContent}`);
  for (const node of all("[role=img]"))
    if (node.querySelector("button, a, [tabindex]")) faults.push(`focus within: ${name(node)}`);
  for (const node of all("body *")) {
    const scrolls = /auto|scroll/.test(getComputedStyle(node).overflowY);
    if (scrolls && node.scrollHeight > node.clientHeight + 1 && node.tabIndex < 0)
      faults.push(`not by keyboard: ${node.className}`);
  }
  const ids = all("[id]").map((node) => node.id);
  if (new Set(ids).size < ids.length) faults.push("two equal ids");
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) faults.push("wider than the window");
  for (const node of all("svg.main-svg, svg text")) {
    const { left, right } = node.getBoundingClientRect();
    if (left < 0 || right > width) faults.push(`cut: ${node.textContent.slice(0, 40)}`);
  }
  return faults;
}
"""
"""Function that returns what assistive programs cannot use, by the rules of axe-core, and what is
cut at the window's edges."""

FAULTS = f"({FAULTS_OF_THE_PAGE})()"

FAULTS_IN_THE_END = """
(async (faults) => {
  for (let wait = 0; wait < 600 && faults().length; wait += 1)
    await new Promise((resolve) => setTimeout(resolve, 100));
  return faults();
})
"""
"""Function that waits up to a minute until a page is drawn anew and has no faults."""


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_can_be_read_by_ear_and_by_keyboard(
    page_of_a_plan: Path, tmp_path: Path, width: int
) -> None:
    with opened(page_of_a_plan.as_uri(), tmp_path / "profile", width=width) as page:
        assert page.value(FAULTS) == []


def test_a_page_of_a_study_fits_a_phone_also_when_that_is_turned(
    page_of_a_study: Path, tmp_path: Path
) -> None:
    with opened(page_of_a_study.as_uri(), tmp_path / "profile", width=844) as page:
        for width in (390, 844):
            sizes = {"width": width, "height": 800, "deviceScaleFactor": 1}
            page.call("Emulation.setDeviceMetricsOverride", mobile=False, **sizes)
            assert page.value(f"{FAULTS_IN_THE_END}({FAULTS_OF_THE_PAGE})") == []


CONTRASTS = """
(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    throw new Error("no background");
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    const style = getComputedStyle(node);
    const is_field = node.matches("input, select");
    const hidden = node.closest("script, style, noscript") || !node.getClientRects().length;
    if (!(own || is_field) || hidden) continue;
    const ink = node.ownerSVGElement ? style.fill : style.color;
    if (ink === "none" || parse(ink)[3] === 0) continue;
    const ratio = (ink, back) => {
      const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
      return (high + 0.05) / (low + 0.05);
    };
    const host = node.ownerSVGElement ? node.closest(".chart") : node;
    const row = node.closest("tr.infeasible") ? " infeasible" : "";
    const name = `${node.tagName} ${node.className.baseVal ?? node.className}${row}`;
    const text = `text of ${name}`;
    found[text] = Math.min(ratio(parse(ink), behind(host)), found[text] ?? 99);
    if (is_field)
      found[`border of ${name}`] = ratio(parse(style.borderTopColor), behind(node.parentElement));
  }
  return found;
})()
"""
"""Script that returns the least contrast of visible text and background, by element and class."""


@pytest.fixture
def page_of_a_plan(tmp_path: Path) -> Path:
    """The report of the small experiment; some of its strategies do not fit."""
    experiment, page = tmp_path / "small.yaml", tmp_path / "report.html"
    text = SMALL.replace("slots: 2,", "slots: 2, memory_gib: 2.55,")
    experiment.write_text(
        f"{text}recompute: auto\nzero_stage: 0\nsearch: {{max_cp: 1, virtual_stages: [1]}}\n",
        encoding="utf-8",
    )
    amp.write_report(experiment, page)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(
    page_of_a_plan: Path, tmp_path: Path, scheme: str
) -> None:
    """Minimum contrast by WCAG 2.1 AA: 4.5 for texts, 3 for the borders of fields."""
    with opened(page_of_a_plan.as_uri(), tmp_path / "profile", scheme) as page:
        page.value(
            "document.querySelector('.slots').append(Object.assign("
            "document.createElement('span'), {className: 'idle', textContent: 'idle'})) ?? 0"
        )
        found = page.value(CONTRASTS)
    assert len(found) > 12
    assert {
        "text of TD ",
        "text of TD text infeasible",
        "text of SPAN idle",
        "border of INPUT ",
    } <= set(found)
    poor = {
        name: round(ratio, 2)
        for name, ratio in found.items()
        if ratio < (3.0 if name.startswith("border") else 4.5)
    }
    assert poor == {}


def test_the_table_is_searched_sorted_and_read_by_keyboard_alone(
    page_of_a_plan: Path, tmp_path: Path
) -> None:
    focused = """(() => { const at = document.activeElement, style = getComputedStyle(at);
      return [at.id || at.textContent.slice(0, 12) || at.tagName,
        at.labels?.[0]?.textContent || at.getAttribute("aria-label") || at.textContent,
        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1]; })()"""
    rows = "document.querySelectorAll('#rows tr').length"
    first = "document.querySelector('#rows td:nth-child(3)').textContent"
    with opened(page_of_a_plan.as_uri(), tmp_path / "profile") as page:
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        stops = []
        for _ in range(40):
            page.press("Tab", 9)
            stops.append(page.value(focused))
            if stops[-1][0] == "s/iter":
                break
        names = [name for name, _, _ in stops]
        assert names[-1] == "s/iter"
        assert names.index("filter") < names.index("which") < names.index("#")
        assert all(label for _, label, _ in stops)
        assert all(visible for name, _, visible in stops if name in {"filter", "which", "#"})
        assert any(label == "All candidates" for _, label, _ in stops), "rows cannot be scrolled"
        page.press("Enter", 13, "\r")
        fastest = page.value(first)
        page.press("Enter", 13, "\r")
        assert page.value(first) != fastest
        assert page.value("document.activeElement.parentElement.ariaSort") == "descending"
        page.value("document.getElementById('filter').focus()")
        before = page.value(rows)
        for key in ("t", "p", " ", "2"):
            page.press(key, ord(key.upper()), key)
        plans = page.value(
            "[...document.querySelectorAll('#rows td.text:nth-child(2)')]"
            ".map(cell => cell.textContent)"
        )
        assert 0 < page.value(rows) < before
        assert all("tp 2" in plan for plan in plans)
        assert page.value("document.getElementById('count').textContent").startswith(
            f"{page.value(rows)} of {before}"
        )
