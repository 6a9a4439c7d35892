import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.hostfile import (
    HostSlots,
    SshTarget,
    format_hostfile,
    parse_hostfile,
    parse_target,
)


def test_order_and_unequal_slots_are_kept() -> None:
    hosts = parse_hostfile("b slots=4\na slots=2\n")
    assert hosts == (HostSlots(host="b", num_slots=4), HostSlots(host="a", num_slots=2))


def test_comments_and_blank_lines_are_skipped() -> None:
    assert parse_hostfile("# all\n\n a slots=1 # one\n") == (HostSlots(host="a", num_slots=1),)


def test_a_file_without_an_end_of_line_is_whole() -> None:
    assert parse_hostfile("a slots=1") == (HostSlots(host="a", num_slots=1),)


def test_windows_line_ends_are_read() -> None:
    assert [entry.host for entry in parse_hostfile("a slots=1\r\nb slots=1\r\n")] == ["a", "b"]


def test_lines_are_written_in_deepspeeds_form() -> None:
    assert format_hostfile((HostSlots(host="10.0.0.1", num_slots=8),)) == "10.0.0.1 slots=8\n"


def test_a_number_alone_is_a_number_of_slots() -> None:
    hosts = parse_hostfile("a slots=8\n\n10.0.0.1  16\nb\t2  # old\n", file="hosts")
    assert [(entry.host, entry.num_slots) for entry in hosts] == [
        ("a", 8),
        ("10.0.0.1", 16),
        ("b", 2),
    ]


@pytest.mark.parametrize("slots", ["0", "-1", "4.0", "four", "9" * 5000])
def test_slots_that_are_no_positive_integer_are_refused(slots: str) -> None:
    with pytest.raises(InputError, match=r"^hosts:2: slots must be a positive integer"):
        parse_hostfile(f"b slots=1\na slots={slots}\n", file="hosts")


@pytest.mark.parametrize("number", ["0", "-1", "4.0", "9" * 5000])
def test_a_number_that_is_no_positive_integer_is_refused(number: str) -> None:
    with pytest.raises(InputError, match=r"^hosts:1: slots must be a positive integer"):
        parse_hostfile(f"a {number}\n", file="hosts")


@pytest.mark.parametrize("line", ["a", "a b", "a gpus=2", "a slots 2", "a slots=2 3", "a 2 3"])
def test_a_line_of_another_form_is_named(line: str) -> None:
    message = rf"^hosts:1: found '{line}': expected 'host slots=N' or 'host N'$"
    with pytest.raises(InputError, match=message):
        parse_hostfile(f"{line}\n", file="hosts")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a", SshTarget(host="a")),
        ("node-1.example_x", SshTarget(host="node-1.example_x")),
        ("ada@a:2222", SshTarget(host="a", user="ada", port=2222)),
        ("[::1]", SshTarget(host="::1")),
        ("10.0.0.1:22", SshTarget(host="10.0.0.1", port=22)),
    ],
)
def test_targets_are_read(text: str, target: SshTarget) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "$(a)",
        "a:0",
        "a:65536",
        "a:x",
        "::1",
        "@a",
        "a@",
        "a'",
        "a#b",
        "../a",
        ".",
        "a/b",
        "a\\b",
        "a\x1b[2J",
        "h;$(touch${IFS}owned)",
        "`touch`",
        "h&",
        "hö",
        "a:²",
        "a\n",
        "a" * 256,
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"expected \[user@\]host\[:port\]"):
        parse_target(text)
    with pytest.raises(InputError, match=r"expected \[user@\]host\[:port\]"):
        HostSlots(host=text, num_slots=1)


def test_a_host_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, found 0"):
        HostSlots(host="a", num_slots=0)
