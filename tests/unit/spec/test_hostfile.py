import pytest

from amp_ray.errors import InputError
from amp_ray.spec.hostfile import HostSlots, format_hostfile, parse_hostfile


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


def test_metis_form_is_named_with_what_to_write() -> None:
    with pytest.raises(InputError, match=r"^hosts:2: .*Metis's form; write '10.0.0.1 slots=8'$"):
        parse_hostfile("a slots=8\n10.0.0.1 8\n", file="hosts")


@pytest.mark.parametrize("slots", ["0", "-1", "4.0", "four", "9" * 5000])
def test_slots_that_are_no_positive_integer_are_refused(slots: str) -> None:
    with pytest.raises(InputError, match="slots must be a positive integer"):
        parse_hostfile(f"a slots={slots}\n")


@pytest.mark.parametrize("host", ["", "a b", "a#b", "-oProxyCommand=x"])
def test_a_host_that_no_hostfile_can_hold_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="a host name has no spaces"):
        HostSlots(host=host, num_slots=1)


def test_a_host_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, found 0"):
        HostSlots(host="a", num_slots=0)
