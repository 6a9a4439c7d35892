"""Parts of the documents that are made from the code are in their pages as the code has them."""

import re
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import amp_ray
from amp_ray.cli import commands
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.runtimes.traits import RUNTIMES, RuntimeTraits


@pytest.fixture(scope="module")
def reference(repository: Path) -> Any:  # noqa: ANN401 - a module that is no part of a package
    """The program behind `make reference`."""
    spec = spec_from_file_location("reference", repository / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_have_what_the_code_has(reference: Any, repository: Path) -> None:  # noqa: ANN401
    for path in sorted(repository.joinpath("docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert text == reference.filled(text), f"{path.name} is stale: run make reference"
        assert not re.search("^:::", text, re.MULTILINE)


def test_the_reference_can_be_read_in_the_repository(repository: Path) -> None:
    docs = repository / "docs"
    page = (docs / "commands.md").read_text(encoding="utf-8")
    assert [name for name in commands.names if f"\n## amp-ray {name}\n" not in page] == []
    page = (docs / "api.md").read_text(encoding="utf-8")
    names = set(amp_ray.__all__) - {"__version__"}
    assert [name for name in names if f"\n### {name}\n" not in page] == []
    page = (docs / "devices.md").read_text(encoding="utf-8")
    assert [name for name in CATALOGUE if f"| `{name}` |" not in page] == []
    page = (docs / "runtimes.md").read_text(encoding="utf-8")
    assert [name for name in RUNTIMES if f"| `{name}` |" not in page] == []
    for owner in (RuntimeTraits, Constants):
        for field in fields(owner):
            assert re.search(rf"^\| `{field.name}` \| .* \| \S.* \|$", page, re.MULTILINE), (
                field.name
            )


def test_what_is_not_there_is_refused(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    block = "<!-- reference: keys NodeSection -->\nstale text\n<!-- end -->\n"
    text = reference.filled(f"a\n{block}b\n")
    assert "| `slots` | count | needed | Devices per node" in text
    assert "stale text" not in text
    assert text.startswith("a\n<!-- reference: keys NodeSection -->\n\n| key")
    assert text.endswith(" |\n\n<!-- end -->\nb\n")
    with pytest.raises(ValueError, match="reference: kees NodeSection -->: expected one of api"):
        reference.filled(block.replace("keys", "kees"))
    monkeypatch.setattr(reference, "_texts", lambda _: {"slots": "Devices."})
    with pytest.raises(ValueError, match="NodeSection: no text below count, device"):
        reference.filled(block)
