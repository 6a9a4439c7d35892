"""What a user may get wrong in a hostfile."""

from typing import Final

import pytest

from support.bad_input import WITH_HOSTFILE, Refused

HOSTFILES: Final[dict[str, tuple[str | bytes, str]]] = {
    "a host alone": (
        "10.0.0.1\n10.0.0.2 8\n",
        "hosts:1: found '10.0.0.1': expected 'host slots=N' or 'host N'",
    ),
    "another form": (
        "a slots=2\nb gpus=2\n",
        "hosts:2: found 'b gpus=2': expected 'host slots=N' or 'host N'",
    ),
    "host twice": (
        "a slots=2\n\na slots=2\n",
        "hosts:3: host 'a' stands here and on line 1: name it once",
    ),
    "no slots": (
        "a slots=0\nb slots=2\n",
        "hosts:1: slots must be a positive integer, found '0' for host 'a'",
    ),
    "slots as a word": (
        "a slots=four\n",
        "hosts:1: slots must be a positive integer, found 'four' for host 'a'",
    ),
    "a host that is an option": (
        "-oProxyCommand=x slots=2\n",
        "hosts:1: found host '-oProxyCommand=x': expected [user@]host[:port] of letters, digits, ",
    ),
    "a host that is a path": (
        "../a slots=2\nb slots=2\n",
        "hosts:1: found host '../a': expected",
    ),
    "a host for a terminal": (
        "a\x1b[2J slots=2\nb slots=2\n",
        "hosts:1: found host 'a\\x1b[2J': expected",
    ),
    "no host": (
        "# none yet\n",
        "experiment.yaml:4: cluster.hostfile: hosts: no host found: expected lines like",
    ),
    "not UTF-8": (
        b"h\xf6st slots=2\n",
        "experiment.yaml:4: cluster.hostfile: hosts: not a text file (byte 1 is not UTF-8)",
    ),
    "other number of hosts": (
        "a slots=2\n",
        "experiment.yaml:5: cluster.nodes: describes 2 hosts and hostfile 'hosts' names 1: ",
    ),
    "other number of slots": (
        "a slots=2\nb slots=4\n",
        "experiment.yaml:6: cluster.nodes.0.slots: found 2; host 'b' has slots=4 in 'hosts'",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTFILES.values(), ids=HOSTFILES)
def test_a_wrong_hostfile_is_led_to_its_line(
    refused: Refused, content: str | bytes, message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_HOSTFILE, "hosts": content})


def test_a_missing_hostfile_is_led_to_the_key_that_names_it(refused: Refused) -> None:
    message = refused({"experiment.yaml": WITH_HOSTFILE})
    assert message == "experiment.yaml:4: cluster.hostfile: hosts: no such file"


def test_a_folder_in_place_of_the_hostfile_is_told(refused: Refused) -> None:
    message = refused({"experiment.yaml": WITH_HOSTFILE, "hosts/a": "x"})
    assert message.endswith("hosts: this is a folder; expected a file")
