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


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=8\n\n10.0.0.1  16\nb\t2  # old\n", "a 8, 10.0.0.1 16, b 2"),
        ("a slots = 8\n", "a 8"),
        ("a\nu@b:22 slots=4\n", "a -, u@b:22 4"),
        ("a slots=8 max_slots=8\nb max-slots=9 slots=8\n", "a 8, b 8"),
        ("a:8\nu@b:4\n[fe80::1]:2\n", "a 8, u@b 4, [fe80::1] 2"),
        ("a:8,b:4,c\n", "a 8, b 4, c -"),
        ("a,b slots=2\n", "a 2, b 2"),
        ("node[01-03,7]\n", "node01 -, node02 -, node03 -, node7 -"),
        ("node[099-101]-ib slots=8\n", "node099-ib 8, node100-ib 8, node101-ib 8"),
        (
            "gpu-st-p5-[1-2],x,r[1-2]n[8-9]:4\n",
            "gpu-st-p5-1 -, gpu-st-p5-2 -, x -, r1n8 4, r1n9 4, r2n8 4, r2n9 4",
        ),
        ("n1\nn2\nn1\nn2\nn1\n", "n1 3, n2 2"),
        ("n1,n1,n2\nm slots=4\n", "n1 2, n2 1, m 4"),
        ("a:2201 slots=1\na:2202 slots=1\n", "a:2201 1, a:2202 1"),
    ],
)
def test_forms_of_other_programs_are_read(text: str, hosts: str) -> None:
    read = (f"{entry.host} {entry.num_slots or '-'}" for entry in parse_hostfile(text))
    assert ", ".join(read) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localhost slots=2\n127.0.0.1 slots=2\n", "h:2: host '127.0.0.1' is the same machine as"),
        ("u@10.0.0.5 slots=4\nv@10.0.0.5 slots=4\n", "'u@10.0.0.5' on line 1: name it once"),
        ("[fe80::1] slots=4\n[fe80:0::1] slots=4\n", "is the same machine as '[fe80::1]'"),
        ("Node1\nnode1.\n", "is the same machine as 'Node1'"),
        ("a slots=4\nb\na\n", "h:3: host 'a' stands here and on line 1: name it once"),
        ("a:2222\n", "a port is read with slots beside it, as 'a:2222 slots=8'"),
        ("a slots=4 max_slots=2\n", "max_slots needs slots beside it, at most as many"),
        ("a max_slots=2\n", "max_slots needs slots beside it, at most as many"),
        ("a slots=4 slots=4\n", "expected 'host'"),
        ("node[4-1]\n", "found [4-1]: expected numbers such as 01-04,7"),
        ("node[1-4,]\n", "found [1-4,]: expected numbers such as 01-04,7"),
        ("node[0-999999999]\n", "more than 100,000 hosts"),
        ("r[1-999]n[1-999]\n", "more than 100,000 hosts"),
        ("a[1-99999],b[1-99999]\n", "found more than 100,000 hosts"),
        ("node[1-4\n", "expected 'host'"),
        ("node[1-4:2]\n", "expected [user@]host[:port]"),
        ("a,,b\n", "expected 'host'"),
        ("a, b\n", "expected 'host'"),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_hostfile(text, file="h")
    assert message in str(caught.value)
    assert str(caught.value).startswith("h:")


@pytest.mark.parametrize("slots", ["0", "-1", "4.0", "four", "9" * 5000])
def test_slots_that_are_no_positive_integer_are_refused(slots: str) -> None:
    with pytest.raises(InputError, match=r"^hosts:2: slots must be a positive integer"):
        parse_hostfile(f"b slots=1\na slots={slots}\n", file="hosts")


@pytest.mark.parametrize("number", ["0", "-1", "4.0", "9" * 5000])
def test_a_number_that_is_no_positive_integer_is_refused(number: str) -> None:
    with pytest.raises(InputError, match=r"^hosts:1: slots must be a positive integer"):
        parse_hostfile(f"a {number}\n", file="hosts")


@pytest.mark.parametrize("line", ["a b", "a gpus=2", "a slots 2", "a slots=2 3", "a 2 3"])
def test_a_line_of_another_form_is_named(line: str) -> None:
    message = rf"^hosts:1: found '{line}': expected 'host', 'host slots=N', 'host N' or 'host:N'"
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


def test_a_byte_order_mark_is_read_at_the_start_and_named_elsewhere() -> None:
    assert parse_hostfile("\ufeffa slots=4\n") == parse_hostfile("a slots=4\n")
    with pytest.raises(InputError, match=r"hosts:2: a byte order mark .* take it out"):
        parse_hostfile("a slots=4\n\ufeffb slots=4\n", file="hosts")
