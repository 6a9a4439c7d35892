"""Tables that ship with the package."""

from importlib import resources
from pathlib import Path

import pytest
from pydantic import ValidationError

from amp_ray.inputs.yaml_text import read_yaml
from amp_ray.shipped import Table, Words

PACKAGE = Path(str(resources.files("amp_ray")))


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.yaml")), ids=lambda file: file.stem)
def test_no_key_of_a_shipped_file_is_repeated(file: Path) -> None:
    text = file.read_text("utf-8").replace("<<: *names,", "")
    read_yaml(text, file=file.name)  # refuses repeated keys


@pytest.mark.parametrize("text", ["words: a b\nmore: c\n", "other: a\n", "words: {a: b}\n"])
def test_a_table_has_its_fields_and_no_others(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(Table):
        file = "short.yaml"
        words: Words

    monkeypatch.setattr("amp_ray.shipped.resources.files", lambda _: tmp_path)
    tmp_path.joinpath("short.yaml").write_text(text)
    with pytest.raises(ValidationError):
        Short.shipped()
    tmp_path.joinpath("short.yaml").write_text("words: >-\n  a\n  b\n")
    assert Short.shipped().words == ("a", "b")
