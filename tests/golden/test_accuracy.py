"""The cost model's figures on published measurements; a change has to state its effect.

`python experiments/accuracy.py --golden tests/golden/accuracy.json` writes a new golden copy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from amp_ray.errors import InputError
from published.sections import SECTIONS, Sources, rounded

ROUNDING: Final = 0.0006
"""Figures have four decimals; the rest is what other libraries add up in another order."""

BAND: Final = "band"

FAST: Final = [name for name, section in SECTIONS.items() if not section.is_slow]


def golden(repository: Path, name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a section of the golden copy without its bands, which need many draws."""
    text = (repository / "tests" / "golden" / "accuracy.json").read_text(encoding="utf-8")
    return {
        label: row for label, row in json.loads(text)[name].items() if not label.startswith(BAND)
    }


def test_every_section_has_a_golden_copy(repository: Path) -> None:
    assert [name for name in SECTIONS if not golden(repository, name)] == []


@pytest.mark.parametrize("name", FAST)
def test_figures_of_published_tables_are_the_golden_ones(name: str, repository: Path) -> None:
    found, expected = rounded(SECTIONS[name].compute(Sources())), golden(repository, name)
    assert list(found) == list(expected)
    for label, row in expected.items():
        assert found[label] == pytest.approx(dict(row), abs=ROUNDING), label


def test_an_absent_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vtrain\.yaml: no such file"):
        SECTIONS["vtrain"].compute(Sources(data=tmp_path))
