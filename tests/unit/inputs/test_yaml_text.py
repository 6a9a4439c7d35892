import math
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import InputError
from amp_ray.inputs.yaml_text import Document, parse_yaml, shown_change, with_changes

TEXT = """\
name: x
nodes:
  - {count: 2}
  -
    count: 1
"""


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("''", ""),
    ],
)
def test_a_word_means_what_yaml_1_2_says(word: str, value: object) -> None:
    found = parse_yaml(f"key: {word}", file="x").values["key"]
    assert (found, type(found)) == (value, type(value))


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_yaml("key: .nan", file="x").values["key"])


def test_a_large_integer_is_a_number() -> None:
    assert parse_yaml("key: 1" + "0" * 22, file="x").values["key"] == 10**22


def test_an_integer_that_no_float_holds_stays_text() -> None:
    digits = "9" * 5000
    assert parse_yaml(f"key: {digits}", file="x").values["key"] == digits


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse_yaml("1: a\ntrue: b\n", file="x").values == {"1": "a", "true": "b"}


def test_an_alias_repeats_a_value() -> None:
    values = parse_yaml("a: &x {b: 1}\nc: [*x, *x]\n", file="x").values
    assert values == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}


def test_keys_and_entries_know_their_lines() -> None:
    assert parse_yaml(TEXT, file="x").lines == {
        ("name",): 1,
        ("nodes",): 2,
        ("nodes", 0): 3,
        ("nodes", 0, "count"): 3,
        ("nodes", 1): 5,
        ("nodes", 1, "count"): 5,
    }


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("nodes", 1, "count"), "x.yaml:5: nodes.1.count"),
        (("nodes", 1, "device"), "x.yaml:5: nodes.1.device"),
        (("cluster", "nodes"), "x.yaml: cluster.nodes"),
        ((), "x.yaml"),
    ],
)
def test_a_place_is_that_of_the_nearest_parent_in_the_file(
    path: tuple[str | int, ...], place: str
) -> None:
    assert str(parse_yaml(TEXT, file="x.yaml").where(*path)) == place


def test_a_check_of_a_value_is_led_to_its_place() -> None:
    document = parse_yaml(TEXT, file="x.yaml")
    with pytest.raises(InputError, match=r"^x\.yaml:1: name: "), document.at("name"):
        int("x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: expected a mapping .* found an empty file"),
        ("- a", "x: expected a mapping .* found a list"),
        ("word", "x: expected a mapping .* found text"),
        ("8", "x: expected a mapping .* found a single value"),
        ("a: 1\n\tb: 2", "x:2: not valid YAML: found character"),
        ("a: 1\n---\na: 1", "x:2: not valid YAML: but found another document"),
        ("a: 1\n\x01", r"x:2: not valid YAML: character '\\x01'"),
        ("a: 1\na: 2", "x:2: key 'a' stands here and on line 1: keep one"),
        ("a: {b: 1", "x:1: not valid YAML: .*; the file ends here: is it cut short"),
        ("a: !!int x", "x:1: found the tag .*int'; write the value alone"),
        ("a: &b [*b]", "x:1: a value cannot stand within itself"),
        ("a: &b {c: *b}", "x:1: a value cannot stand within itself"),
        ("[a]: 1", "x:1: expected a word as the key"),
        ("a:\n " + "[" * 51, "x:2: not valid YAML: nested more than 50 levels deep"),
        ("a: [" + "x," * 100_001, "x:1: not valid YAML: more than 100,000 values"),
        ("#" * 2**20 + "\n", "x: found 1,048,577 characters; expected at most 1,048,576"),
        (
            "a: &a [" + "x," * 9_999 + "]\nb: [*a, *a, *a, *a, *a]\nc: [*a, *a, *a, *a, *a, *a]\n",
            "x:1: stands for 120,006 values by its aliases; at most 100,000",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        parse_yaml(text, file="x")


def test_a_document_can_be_made_of_values_alone() -> None:
    values: dict[str, Any] = {"a": 1}
    assert str(Document(file="x", values=values).where("a")) == "x: a"


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("name=y", ("name",), "y"),
        ("nodes.0.count=8", ("nodes", 0, "count"), 8),
        ("search.space=placement", ("search", "space"), "placement"),
        ("search.micro_batch_sizes=[1, 2]", ("search", "micro_batch_sizes"), [1, 2]),
        ("tokens=1e12", ("tokens",), 1e12),
        ("hostfile=", ("hostfile",), None),
    ],
)
def test_a_change_sets_one_key(change: str, path: tuple[str | int, ...], value: object) -> None:
    before = parse_yaml(TEXT, file="x")
    after: Any = with_changes(before, [change])
    found = after.values
    for part in path:
        found = found[part]
    assert found == value
    assert before.values == parse_yaml(TEXT, file="x").values
    assert str(after.where(*path)) == f"--set {change}: {'.'.join(map(str, path))}"
    assert after.where("nodes", 1, "count").line == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("a..b=3", "expected KEY=VALUE"),
        ("nodes.2.count=1", "found '2' for a list of 2"),
        ("nodes.count=1", "found 'count' for a list of 2"),
        ("name.x=1", "'x' leads into a plain value, which has no keys"),
        ("name=[1", "not valid YAML"),
        ("name=!!python/object:os.system x", "found the tag"),
    ],
)
def test_a_change_that_leads_nowhere_is_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        with_changes(parse_yaml(TEXT, file="x"), [change])


DOCUMENT = "{a: [1, {b: 2}], environment: {x: y}, command: [run]}"
WORDS = ["a", "b", "0", "1", "-1", "00", "9" * 5000, "x", "environment", "", "\u0663"]
PART = st.sampled_from(WORDS)


@given(parts=st.lists(PART, min_size=1, max_size=4), long=st.booleans(), value=st.text(max_size=9))
def test_any_key_is_set_or_refused(parts: list[str], *, long: bool, value: str) -> None:
    key = ".".join(parts * 60 if long else parts)
    with suppress(InputError):
        changed = with_changes(parse_yaml(DOCUMENT, file="x"), [f"{key}={value}"])
        [path] = changed.changes
        assert ".".join(map(str, path)) == key.strip()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("environment.0=1", {"environment": {"x": "y", "0": 1}}),
        ("a.1.b=3", {"a": [1, {"b": 3}]}),
        ("a.01=3", "'01' for a list of 2; its entries count from 0"),
        ("a.b=3", "'b' for a list of 2"),
        ("a.0.1=3", "'1' leads into a plain value"),
        (".".join("x" * 51) + "=1", "a key of more than 50 parts"),
    ],
)
def test_numbers_are_places_in_lists_and_names_in_mappings(change: str, expected: object) -> None:
    document = parse_yaml(DOCUMENT, file="x")
    if isinstance(expected, dict):
        assert with_changes(document, [change]).values == {**document.values, **expected}
        return
    with pytest.raises(InputError, match=str(expected)):
        with_changes(document, [change])


HIDDEN = "(not kept: it looks secret)"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "environment={A_TOKEN: s3, B: b},{A_TOKEN: s4}",
            f'environment=[{{"A_TOKEN": "{HIDDEN}", "B": "b"}}, {{"A_TOKEN": "{HIDDEN}"}}]',
        ),
        ("environment.A_TOKEN=s3", f"environment.A_TOKEN={HIDDEN}"),
        ("command=[run, --api-key, s3]", f'command=["run", "--api-key", "{HIDDEN}"]'),
        ("environment={A_TOKEN: s3", f"environment={HIDDEN}"),
        ("name=a key to tokens", "name=a key to tokens"),
        ("tokens=1e12,2e12", "tokens=1e12,2e12"),
    ],
)
def test_secret_values_of_a_change_are_not_shown(change: str, expected: str) -> None:
    assert shown_change(change) == expected
