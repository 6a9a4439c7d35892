import socket

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.runtime.hosts.login import login_failure, ssh_words

SETTINGS = SshSettings(known_hosts="/k/known hosts", identities=("/k/id",), user="ada")


def error(text: str, cause: Exception | None = None) -> HostError:
    found = HostError(text)
    found.__cause__ = cause
    return found


def test_words_say_what_the_settings_say() -> None:
    assert ssh_words("a", SshSettings()) == ("ssh", "a")
    assert ssh_words("bob@[fe80::1]:2222", SETTINGS) == (
        *("ssh", "-o", "UserKnownHostsFile=/k/known hosts", "-i", "/k/id"),
        *("-p", "2222", "bob@fe80::1"),
    )
    assert ssh_words("a", SshSettings(config=None)) == ("ssh", "-F", "none", "a")
    assert ssh_words("a", SshSettings(config="/c")) == ("ssh", "-F", "/c", "a")


def test_an_unknown_key_keeps_fingerprint_advice_and_command_apart() -> None:
    text = (
        "a: its ssh-ed25519 key SHA256:x is not in /k/known. Compare it with the host's own "
        "(ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there), then add it with: "
        "ssh-keyscan -p 22 a >> /k/known"
    )
    finding = login_failure("a", error(text), SETTINGS)
    assert (finding.check, finding.level) == ("host key", "error")
    assert finding.found == "a: its ssh-ed25519 key SHA256:x is not in /k/known"
    assert finding.command == "ssh-keyscan -p 22 a >> /k/known"
    assert "ssh_host_*_key.pub" in finding.advice


def test_a_changed_key_has_the_command_that_forgets_it() -> None:
    text = (
        "ada@a: its key has changed: expected SHA256:x, found SHA256:y. If you know why, run: "
        "ssh-keygen -R a -f k && ssh-keyscan -p 22 a >> k"
    )
    finding = login_failure("a", error(text), SETTINGS)
    assert finding.check == "host key"
    assert finding.command == "ssh-keygen -R a -f k && ssh-keyscan -p 22 a >> k"


@pytest.mark.parametrize("names", ["/k/it's", "/k/it's, /k/other"])
def test_a_missing_key_file_has_the_command_that_makes_the_first(names: str) -> None:
    text = f"a: key file {names} does not exist; name an existing one as identity file, or ..."
    finding = login_failure("a", error(text), SETTINGS)
    assert finding.check == "login"
    assert finding.command == """ssh-keygen -t ed25519 -f '/k/it'"'"'s'"""


def test_a_refused_login_has_the_command_that_hands_the_key_over() -> None:
    text = (
        "ada@a: login refused: Authentication failed.; key files tried: /k/id, /k/id2; "
        "ssh-agent not asked (use_agent is off)"
    )
    finding = login_failure("a:2222", error(text), SETTINGS)
    assert finding.command == (
        "ssh-copy-id -o 'UserKnownHostsFile=/k/known hosts' -i /k/id -p 2222 ada@a"
    )
    without = text.replace("/k/id, /k/id2", "none")
    assert login_failure("a", error(without), SshSettings()).command == "ssh-copy-id a"


def test_a_key_with_a_passphrase_goes_to_the_agent() -> None:
    text = (
        "ada@a: login refused: private key file is encrypted; key files tried: /k/id; "
        "ssh-agent not asked (use_agent is off)"
    )
    finding = login_failure("a", error(text), SETTINGS)
    assert finding.command == "ssh-add /k/id"
    assert "use_agent" in finding.advice


def test_whatever_else_is_a_host_that_cannot_be_reached() -> None:
    finding = login_failure("a", error("ada@a: no answer within 10.0 s", TimeoutError()), SETTINGS)
    assert (finding.check, finding.expected) == ("reach", "an SSH server that answers within 10 s")
    assert finding.command is not None
    assert finding.command.startswith("ssh -v -o ConnectTimeout=10 ")
    assert finding.command.endswith(" ada@a true")


def test_a_name_that_means_nothing_is_to_be_given_an_address() -> None:
    finding = login_failure("a", error("ada@a: unknown", socket.gaierror(-2, "no")), SETTINGS)
    assert "HostName" in finding.advice
