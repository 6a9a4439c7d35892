"""The cost model's figures on published measurements; a change has to state its effect.

`python experiments/accuracy.py --golden tests/golden/accuracy.json` writes a new golden copy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from amp_ray.testing.accuracy.sections import SECTIONS, Sources, compute, rounded

ROUNDING: Final = 0.0006
"""Figures have four decimals; the rest is what other libraries add up in another order."""

SHIPPED: Final = "amp_homogeneous"
"""Its table needs no folder beside the checkout."""

BAND: Final = "band"

FAST: Final = [name for name, section in SECTIONS.items() if not section.is_slow]


def golden(repository: Path, name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a section of the golden copy without its bands, which need many draws."""
    text = (repository / "tests" / "golden" / "accuracy.json").read_text(encoding="utf-8")
    return {
        label: row for label, row in json.loads(text)[name].items() if not label.startswith(BAND)
    }


def check(name: str, repository: Path, data: Path) -> None:
    """Compare a section with its golden copy."""
    figures = compute(name, Sources(repository=repository, data=data))
    assert not isinstance(figures, str), figures
    found, expected = rounded(figures), golden(repository, name)
    assert list(found) == list(expected)
    for label, row in expected.items():
        assert found[label] == pytest.approx(dict(row), abs=ROUNDING), label


def test_every_section_has_a_golden_copy(repository: Path) -> None:
    assert [name for name in SECTIONS if not golden(repository, name)] == []


def test_figures_of_the_shipped_table_are_the_golden_ones(repository: Path, tmp_path: Path) -> None:
    check(SHIPPED, repository, tmp_path)


@pytest.mark.parametrize("name", [name for name in FAST if name != SHIPPED])
def test_figures_of_published_tables_are_the_golden_ones(
    name: str, repository: Path, shared_data: Path
) -> None:
    check(name, repository, shared_data)


def test_an_absent_table_is_named(repository: Path, tmp_path: Path) -> None:
    found = compute("vtrain", Sources(repository=repository, data=tmp_path))
    assert isinstance(found, str)
    assert "multi_node_3.6B_18.4B.csv: this table is absent" in found
