import pytest

from amp_ray.errors import InputError, Mistakes, Where, placed

LINE = Where(file="x.yaml", line=3, key="name")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (Where(file="x"), "x"),
        (Where(file="x", line=3), "x:3"),
        (Where(file="x", key="a.b"), "x: a.b"),
        (Where(file="x", line=3, key="a"), "x:3: a"),
    ],
)
def test_a_place_leaves_out_what_is_unknown(where: Where, text: str) -> None:
    assert str(where) == text


def test_a_place_can_be_narrowed_to_a_key() -> None:
    assert Where(file="x", line=3).at("tp") == Where(file="x", line=3, key="tp")


def fail(error: Exception) -> None:
    raise error


def test_an_error_without_a_line_is_led_to_the_one_that_caused_it() -> None:
    error = InputError("no such file", where=Where(file="hosts"))
    with pytest.raises(InputError, match=r"^x\.yaml:3: name: hosts: no such file$"), placed(LINE):
        fail(error)


def test_an_error_with_a_line_of_its_own_stays_as_it_is() -> None:
    error = InputError("wrong", where=Where(file="hosts", line=7))
    with pytest.raises(InputError, match=r"^hosts:7: wrong$"), placed(LINE):
        fail(error)


@pytest.mark.parametrize("file", ["x.yaml", "--set a=1"])
def test_an_error_of_the_same_place_or_an_option_names_it_once(file: str) -> None:
    error = InputError("wrong", where=Where(file=file))
    with pytest.raises(InputError, match=rf"^{file}: wrong$"), placed(Where(file="x.yaml")):
        fail(error)


def test_a_plain_value_error_may_be_our_own_mistake() -> None:
    with pytest.raises(ValueError, match=r"^ours$") as caught, placed(LINE):
        fail(ValueError("ours"))
    assert not isinstance(caught.value, InputError)


def test_a_plain_value_error_is_led_to_the_place_where_asked() -> None:
    with pytest.raises(InputError, match=r"^x\.yaml:3: name: theirs$"), placed(LINE, ValueError):
        fail(ValueError("theirs"))


def test_mistakes_are_told_together_and_each_once() -> None:
    mistakes = Mistakes()
    for message in ("first", "second", "first"):
        with mistakes.collect():
            fail(InputError(message, where=LINE))
    with pytest.raises(InputError) as caught:
        mistakes.check()
    assert [str(part) for part in caught.value.parts] == [
        "x.yaml:3: name: first",
        "x.yaml:3: name: second",
    ]


def test_one_mistake_is_told_as_it_is() -> None:
    mistakes, only = Mistakes(), InputError("only")
    mistakes.add(only)
    with pytest.raises(InputError) as caught:
        mistakes.check()
    assert caught.value is only
    assert only.parts == (only,)


def test_no_mistake_is_no_error() -> None:
    Mistakes().check()


def test_each_of_several_mistakes_is_led_to_the_place() -> None:
    mistakes = Mistakes()
    mistakes.add(InputError("no line"))
    mistakes.add(InputError("line", where=Where(file="y", line=1)))
    with (
        pytest.raises(InputError, match=r"^x\.yaml:3: name: no line\ny:1: line$"),
        placed(LINE),
    ):
        mistakes.check()


def test_a_place_is_one_line_that_no_terminal_obeys() -> None:
    assert str(InputError("x", where=Where(file="f", key="\x1b\nb"))) == "f: \\x1b\\nb: x"
