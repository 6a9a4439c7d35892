import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import InputError
from amp_ray.planners.metis2024.inputs import MetisHost, node_names, parse_metis_hostfile


@pytest.mark.parametrize(
    "line", ["0.0.0.1 slots=16", "0.0.0.1 16", "0.0.0.1   slots = 16", "\t0.0.0.1\t16  # fast"]
)
def test_both_forms_say_the_same(line: str) -> None:
    assert parse_metis_hostfile(line) == (MetisHost(address="0.0.0.1", num_slots=16, line=1),)


def test_an_address_may_stand_there_again() -> None:
    hosts = parse_metis_hostfile("# kinds\na 4\n\na slots=4\n")
    assert [(host.address, host.line) for host in hosts] == [("a", 2), ("a", 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 4\nb\n", "^hosts:2: found 'b'; expected 'IP slots=N' or 'IP N'"),
        ("a 4 5", "^hosts:1: found 'a 4 5'; expected"),
        ("a slots=0", "^hosts:1: slots must be a positive integer, found '0' for host 'a'"),
        ("a four", "^hosts:1: slots must be a positive integer, found 'four' for host 'a'"),
        ("a -4", "^hosts:1: slots must be a positive integer, found '-4' for host 'a'"),
        ("a slots=1.5", "^hosts:1: slots must be a positive integer, found '1.5'"),
        ("-oProxy 4", "^hosts:1: found '-oProxy 4'; expected"),
        ("", "^hosts: no host found: expected lines like"),
        ("# none\n", "^hosts: no host found"),
    ],
)
def test_another_line_is_led_to_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_metis_hostfile(text, file="hosts")


@given(st.lists(st.sampled_from(["a", "a-2", "b"]), min_size=1, max_size=6))
def test_names_are_different_and_start_with_the_address(addresses: list[str]) -> None:
    hosts = parse_metis_hostfile("".join(f"{address} 1\n" for address in addresses))
    names = node_names(hosts)
    assert len(set(names)) == len(names)
    assert all(name.startswith(at) for name, at in zip(names, addresses, strict=True))
