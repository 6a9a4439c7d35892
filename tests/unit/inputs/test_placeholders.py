import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.inputs.placeholders import PLACEHOLDERS, Values, fill_argument, fill_text

VALUES = Values(
    texts={"tp": "2", "pp": "4"},
    several={"megatron_flags": ("--a", "b c")},
    missing={"dp": "stages differ"},
)


def test_several_placeholders_of_one_text_are_filled_in() -> None:
    assert fill_text("--tp={tp},{pp}", VALUES) == "--tp=2,4"


def test_doubled_braces_are_braces() -> None:
    assert fill_text('{{"tp": {tp}, "x": {{}}}}', VALUES) == '{"tp": 2, "x": {}}'


def test_a_value_is_not_filled_in_again() -> None:
    assert fill_text("{tp}", Values(texts={"tp": "{pp} {{"})) == "{pp} {{"


@given(st.text())
def test_any_text_arrives_unchanged_if_its_braces_are_doubled(text: str) -> None:
    doubled = text.replace("{", "{{").replace("}", "}}")
    assert fill_argument(doubled, VALUES) == (text,)


def test_a_placeholder_for_several_arguments_expands() -> None:
    assert fill_argument("{megatron_flags}", VALUES) == ("--a", "b c")


@pytest.mark.parametrize("text", ["--x={megatron_flags}", "{megatron_flags} "])
def test_a_placeholder_for_several_arguments_must_stand_alone(text: str) -> None:
    with pytest.raises(ValueError, match="has to be one of its own"):
        fill_argument(text, VALUES)


def test_an_unknown_placeholder_is_refused_with_a_close_one_and_all_known() -> None:
    with pytest.raises(ValueError, match="micro_batch_sise") as caught:
        fill_text("--b={micro_batch_sise}", VALUES)
    assert "did you mean {micro_batch_size}?" in str(caught.value)
    assert "The placeholders are: tp, pp, dp," in str(caught.value)
    assert "python" in str(caught.value)


@pytest.mark.parametrize("text", ["${HOME}", "{}", "{ tp }", "{tp:03d}", "{tp!r}", '{"a": 1}'])
def test_what_only_looks_like_a_placeholder_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="which is no placeholder"):
        fill_text(text, VALUES)


@pytest.mark.parametrize("text", ["{", "}", "a{tp", "tp}", "{{{", "{tp}}"])
def test_a_brace_without_a_partner_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("write {{ or }} for the brace alone")):
        fill_text(text, VALUES)


@pytest.mark.parametrize("name", ["dp", "megatron_flags"])
def test_a_placeholder_without_a_value_is_refused_with_the_reason(name: str) -> None:
    values = Values(missing={name: "stages differ"})
    with pytest.raises(ValueError, match=rf"{{{name}}} has no value here: stages differ"):
        fill_argument(f"{{{name}}}", values)


def test_later_values_win() -> None:
    both = VALUES | Values(texts={"tp": "8"}, missing={"pp": "no"})
    assert (both.texts["tp"], both.missing) == ("8", {"dp": "stages differ", "pp": "no"})
    assert both.several == VALUES.several


def test_names_can_stand_in_braces() -> None:
    assert all(name.isidentifier() for name in PLACEHOLDERS)
