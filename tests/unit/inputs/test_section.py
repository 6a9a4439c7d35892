import math
from typing import Annotated, Any

import pytest
from pydantic import Field

from amp_ray.errors import InputError
from amp_ray.inputs.section import (
    Count,
    Flag,
    Index,
    Positive,
    Section,
    Text,
    Within,
    validate,
    validate_parts,
)
from amp_ray.inputs.yaml_text import Document, parse_yaml


class Inner(Section):
    count: Count = 1
    index: Index = 0


class Outer(Section):
    name: Text
    share: Positive = 1.0
    fast: Flag = False
    inner: Inner = Inner()
    many: Annotated[list[Inner], Field(max_length=2)] = Field(default_factory=list)
    pair: tuple[Count, Count] = (1, 2)


def check(text: str) -> Outer:
    return validate(Outer, parse_yaml(text, file="x.yaml"))


def test_values_of_the_right_types_are_taken() -> None:
    outer = check("name: a\nshare: 2\nmany: [{count: 3}]\nfast: true\npair: [3, 4]")
    assert (outer.share, outer.many, outer.fast) == (2.0, [Inner(count=3)], True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nome: b", "nome: unknown key 'nome'; did you mean 'name'?"),
        ("zzz: b", "zzz: unknown key 'zzz'; known here: name, share, fast, inner, many"),
        ("share: '2'", "share: found '2'; expected a number alone .the key's name tells the unit."),
        ("share: word", "share: found 'word'; expected a number"),
        ("share: 0", "share: found 0; expected greater than 0"),
        ("share: .inf", "share: found inf; expected a finite number"),
        ("share: true", "share: found true; expected a number"),
        ("fast: 1", "fast: found 1; expected true or false"),
        ("fast: 'true'", "fast: found 'true'; expected true or false"),
        ("inner: {count: 1.0}", "inner.count: found 1.0; expected an integer"),
        ("inner: {index: -1}", "inner.index: found -1; expected greater than or equal to 0"),
        ("inner: {coun: 1}", "inner.coun: unknown key 'coun'; did you mean 'count'?"),
        ("inner: [1]", r"inner: found \[1\]; expected a mapping of keys"),
        ("inner:", "inner: found nothing; expected a mapping of keys"),
        ("many: {}", "many: found {}; expected a list"),
        ("many: [{count: 1}, {count: 0}]", "many.1.count: found 0; expected greater than or"),
        ("many: [{x: 1}]", "many.0.x: unknown key 'x'; known here: count, index"),
        ("pair: [1]", "pair.1: entry 1 is missing"),
        ("pair: 1", "pair: found 1; expected a list"),
    ],
)
def test_a_mistake_names_what_was_found_and_what_is_expected(line: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^x.yaml:2: {message}"):
        check(f"name: a\n{line}")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match=r"^x\.yaml: name: key 'name' is missing$"):
        check("share: 1")


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="name: found ''; expected text, not an empty one"):
        check("name: ''")


def test_all_mistakes_are_told_unknown_keys_first() -> None:
    with pytest.raises(InputError) as caught:
        check("fast: 1\nname: a\nshare: 0\nzzz: 1")
    assert [str(part) for part in caught.value.parts] == [
        "x.yaml:4: zzz: unknown key 'zzz'; known here: name, share, fast, inner, many, pair",
        "x.yaml:1: fast: found 1; expected true or false",
        "x.yaml:3: share: found 0; expected greater than 0",
    ]
    assert str(caught.value) == "\n".join(map(str, caught.value.parts))


def test_a_key_that_is_missing_because_it_is_misspelt_is_told_once() -> None:
    with pytest.raises(InputError, match=r"^x\.yaml:1: nme: unknown key 'nme'; did .* 'name'\?$"):
        check("nme: a")


def test_the_mistakes_of_a_mapping_within_a_document_have_its_place() -> None:
    document = parse_yaml("a: 1\nb:\n  count: 0\n  x: 1", file="x.yaml")
    with pytest.raises(InputError) as caught:
        validate(Inner, document, "b")
    assert [str(part)[:18] for part in caught.value.parts] == [
        "x.yaml:4: b.x: unk",
        "x.yaml:3: b.count:",
    ]


def test_the_parts_without_a_mistake_are_kept() -> None:
    text = "name: a\nshre: 2\nfast: 1\nmany: [{count: 3}]"
    checked, wrong = validate_parts(Outer, parse_yaml(text, file="x.yaml"))
    assert (checked.name, checked.many, checked.inner) == ("a", [Inner(count=3)], Inner())
    assert list(wrong) == ["share", "fast"]
    with pytest.raises(InputError, match=r"^x\.yaml:3: fast: found 1; expected true or false"):
        _ = checked.fast


@pytest.mark.parametrize("value", [0.5, 11, math.nan, math.inf, -1])
def test_a_figure_out_of_its_range_names_range_and_unit(value: float) -> None:
    with pytest.raises(ValueError, match=r"^1 to 10 GiB$"):
        Within(1, 10, "GiB")(value)


def test_a_figure_within_its_range_is_kept() -> None:
    assert [Within(1, 10, "s", or_zero=True)(value) for value in (0, 1, 10)] == [0, 1, 10]
    with pytest.raises(ValueError, match=r"^0 or 1 to 10 s$"):
        Within(1, 10, "s", or_zero=True)(0.5)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(InputError, match=r"found 'a{59}\.\.\.; expected a number$"):
        check(f"name: a\nshare: {'a' * 500}")


def test_values_without_lines_are_led_to_their_key() -> None:
    values: dict[str, Any] = {"name": "a", "many": [{"count": 0}]}
    with pytest.raises(InputError, match=r"^x\.json: many\.0\.count: found 0"):
        validate(Outer, Document(file="x.json", values=values))
