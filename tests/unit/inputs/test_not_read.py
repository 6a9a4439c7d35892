"""Keys of foreign files: the message that names those which are not read."""

from amp_ray.inputs.not_read import NotRead, not_read


def test_a_key_is_named_once_and_without_its_value() -> None:
    [note] = not_read(["tp", "lr", "x", "x"], "a.toml", known=("tp", "l*"), shown_as="--{}")
    assert note == NotRead(file="a.toml", names=("--x",))
    assert str(note) == "not read: --x (a.toml: not modelled)"


def test_no_name_of_a_file_reaches_the_terminal_as_control_characters() -> None:
    names = tuple(f"k{number}\x1b[31m\n" for number in range(30))
    text = str(NotRead(file="f\x1b\n", names=names))
    assert text.isprintable()
    assert all(f"k{number}" in text for number in range(30))
