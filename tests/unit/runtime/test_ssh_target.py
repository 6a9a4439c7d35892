import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.ssh_target import SshTarget, parse_target


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
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"expected \[user@\]host\[:port\]"):
        parse_target(text)
