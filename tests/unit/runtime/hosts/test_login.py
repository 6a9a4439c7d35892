import socket
from pathlib import Path

import paramiko
import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.runtime.hosts.login import LoginError, login_failure, refused, ssh_words
from amp_ray.runtime.hosts.ssh import HostKeyCheck, SshHost, find_routes
from amp_ray.runtime.hosts.ssh_config import SshConfig

SETTINGS = SshSettings(known_hosts="/k/known hosts", identities=("/k/id",), user="ada")


def error(text: str, cause: Exception | None = None) -> HostError:
    error_ = HostError(text)
    error_.__cause__ = cause
    return error_


def test_words_say_what_the_settings_say() -> None:
    assert ssh_words("a", SshSettings()) == ("ssh", "a")
    assert ssh_words("bob@[fe80::1]:2222", SETTINGS) == (
        *("ssh", "-o", "UserKnownHostsFile=/k/known hosts", "-i", "/k/id"),
        *("-p", "2222", "bob@fe80::1"),
    )
    assert ssh_words("a", SshSettings(config=None)) == ("ssh", "-F", "none", "a")
    assert ssh_words("a", SshSettings(config="/c")) == ("ssh", "-F", "/c", "a")


def keyed(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}"


HOSTS_KEY, OTHER_KEY = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()


@pytest.mark.parametrize(
    ("lines", "found", "command", "advice"),
    [
        (
            "",
            f"a: its ecdsa-sha2-nistp256 key {HOSTS_KEY.fingerprint} is not in FILE",
            "ssh-keyscan -p 22 a >> FILE",
            "Compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there)",
        ),
        (
            keyed("@cert-authority *", OTHER_KEY),
            (
                f"a: its ecdsa-sha2-nistp256 key {HOSTS_KEY.fingerprint} is not in FILE, and the "
                "certificates that FILE:1 trusts (@cert-authority) cannot be checked here"
            ),
            "ssh-keyscan -p 22 a >> FILE",
            "Compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there)",
        ),
        (
            keyed("a", OTHER_KEY),
            (
                f"ada@a: its key has changed: expected {OTHER_KEY.fingerprint} (FILE:1), "
                f"found {HOSTS_KEY.fingerprint}"
            ),
            "ssh-keygen -R a -f FILE && ssh-keyscan -p 22 a >> FILE",
            "If you know why",
        ),
        (
            keyed("@revoked *", HOSTS_KEY),
            f"a: its ecdsa-sha2-nistp256 key {HOSTS_KEY.fingerprint} is marked @revoked at FILE:1",
            None,
            (
                "Whoever answers with it may be anybody: give the host a new key, and ask whoever "
                "keeps that file"
            ),
        ),
    ],
    ids=["unknown", "certificates", "changed", "revoked"],
)
def test_a_key_that_is_not_trusted_has_the_command_that_mends_it(
    tmp_path: Path, lines: str, found: str, command: str | None, advice: str
) -> None:
    file = tmp_path / "known"
    file.write_text(lines, encoding="ascii")
    settings = SshSettings(known_hosts=str(file), user="ada", config=None)
    (route,) = find_routes(SshTarget(host="a"), settings, SshConfig(None))
    check = HostKeyCheck(route, settings)
    with pytest.raises(LoginError) as caught:
        check.missing_host_key(paramiko.SSHClient(), "a", HOSTS_KEY)
    finding = login_failure("a", caught.value, settings)
    assert (finding.check, finding.level) == ("host key", "error")
    assert finding.found == found.replace("FILE", str(file))
    assert finding.command == (command and command.replace("FILE", str(file)))
    assert finding.advice == advice
    assert str(caught.value).startswith(f"{finding.found}. {advice}")
    assert str(caught.value).endswith(finding.command or advice)


def test_a_missing_key_file_has_the_command_that_makes_the_first() -> None:
    settings = SshSettings(identities=("/k/it's", "/k/other"), config=None)
    with pytest.raises(LoginError, match=r"a: key file /k/it's, /k/other does not exist") as caught:
        SshHost("a", settings)
    finding = login_failure("a", caught.value, settings)
    assert (finding.check, finding.found) == ("login", "key file /k/it's does not exist")
    assert finding.command == """ssh-keygen -t ed25519 -f '/k/it'"'"'s'"""


@pytest.mark.parametrize(
    ("message", "name", "identities", "command", "advice"),
    [
        (
            "Authentication failed.",
            "a:2222",
            ["/k/id", "/k/id2"],
            "ssh-copy-id -o 'UserKnownHostsFile=/k/known hosts' -i /k/id -p 2222 ada@a",
            "authorized_keys",
        ),
        (
            "Authentication failed.",
            "a",
            [],
            "ssh-copy-id -o 'UserKnownHostsFile=/k/known hosts' ada@a",
            "authorized_keys",
        ),
        ("private key file is encrypted", "a", ["/k/id"], "ssh-add /k/id", "use_agent"),
    ],
)
def test_a_refused_login_has_the_command_that_makes_the_key_known(
    message: str, name: str, identities: list[str], command: str, advice: str
) -> None:
    finding = login_failure(name, refused(name, message, identities, SETTINGS), SETTINGS)
    assert (finding.check, finding.found, finding.command) == ("login", message, command)
    assert advice in finding.advice


def test_whatever_else_is_a_host_that_cannot_be_reached() -> None:
    finding = login_failure("a", error("ada@a: no answer within 10.0 s", TimeoutError()), SETTINGS)
    assert (finding.check, finding.expected) == ("reach", "an SSH server that answers within 10 s")
    assert finding.command is not None
    assert finding.command.startswith("ssh -v -o ConnectTimeout=10 ")
    assert finding.command.endswith(" ada@a true")


def test_a_name_that_means_nothing_is_to_be_given_an_address() -> None:
    finding = login_failure("a", error("ada@a: unknown", socket.gaierror(-2, "no")), SETTINGS)
    assert "HostName" in finding.advice
