"""OpenSSH's configuration: ssh reads it, none of its commands runs, the rest is named."""

import os
import re
import shutil
from pathlib import Path

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.runtime.hosts import ssh_config
from amp_ray.runtime.hosts.ssh_config import HostOptions, SshConfig

N1 = SshTarget(host="n1")


def options_of(folder: Path, text: str, target: SshTarget = N1) -> HostOptions:
    file = folder / "config"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return SshConfig(str(file)).lookup(target)


@pytest.mark.parametrize(
    ("text", "host", "port", "user"),
    [
        ("HostName 127.0.0.1\nPort 41001\nUser ada", "127.0.0.1", 41001, "ada"),
        ("Include {folder}/other", "other", 7, "bob"),
        ("Host n1\n  Include oth* nothing", "other", 7, "bob"),
        ("Match final all\n  Port 5\nHost n1\n  User ada\n  HostName Real", "real", 5, "ada"),
        ("Host * !n1\n  Port 3\nMatch originalhost n? user ada\n  Port 4", "n1", 4, "ada"),
        ("ProxyCommand none\nProxyCommand nc\nUser 'a b'\nHostName=h-%h", "h-n1", 22, "a b"),
    ],
)
def test_a_name_leads_where_ssh_leads(
    tmp_path: Path, text: str, host: str, port: int, user: str
) -> None:
    (tmp_path / "other").write_text("HostName other\nPort 7\nUser bob\n", "utf-8")
    target = SshTarget(host="n1", user="ada") if "user ada" in text else N1
    options = options_of(tmp_path, text.format(folder=tmp_path) + "\n", target)
    assert (options.host, options.port, options.user) == (host, port, user)
    assert not options.jumps
    assert not options.identities
    assert options.known_hosts == {}


def test_keys_jumps_and_known_hosts_have_their_tokens_replaced(tmp_path: Path) -> None:
    lines = (
        *("HostName 10.0.0.7", "ProxyJump ada@%h.gate:2200,b", "HostKeyAlias cluster"),
        *("IdentityFile %d/k_%n", "IdentityFile ~/x", "IdentityFile none"),
        "UserKnownHostsFile /%k /b",
    )
    options = options_of(tmp_path, "\n".join(lines))
    first = SshTarget(host="10.0.0.7.gate", user="ada", port=2200)
    assert options.jumps == (first, SshTarget(host="b"))
    assert options.identities == (f"{Path.home()}/k_n1", "~/x")
    assert options.host_key_alias == "cluster"
    assert options.known_hosts == {"userknownhostsfile": ("/cluster", "/b")}


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("Port 0", 2),
        ("Host other\nPort no", 3),
        ('HostName ""', 2),
        ("User 'ada", 2),
        ("Match typo", 2),
        ("Typo\x1b[31m 1", 2),
    ],
)
def test_a_line_that_openssh_refuses_is_named(tmp_path: Path, lines: str, number: int) -> None:
    with pytest.raises(
        InputError, match=rf"config: ssh cannot read it: .*line {number}: "
    ) as caught:
        options_of(tmp_path, f"# first\n{lines}\n")
    assert str(caught.value).isprintable()


def test_no_command_runs_and_none_decides(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    match = f'Match exec "touch {ran}"'
    for line in ("HostName x", "Port 7", "ProxyJump gw", "BindAddress 10.0.0.1", "ProxyCommand nc"):
        with pytest.raises(HostError, match="depends on the command of a Match exec"):
            options_of(tmp_path, f"{match}\n  {line}\n")
    text = f"Port 6\n{match}\n  Port 7\nMatch exec true originalhost other\n  User bob\n"
    assert options_of(tmp_path, text).port == 6
    assert not ran.exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ProxyCommand nc %h %p", "proxycommand of the ssh configuration is not supported; use"),
        ("CanonicalizeHostname yes", "canonicalizehostname of the ssh configuration is not"),
        ("RevokedHostKeys /k", "revokedhostkeys of the ssh configuration is not supported"),
        ("IdentityFile ${NO_SUCH_VARIABLE}/k", "n1: ${NO_SUCH_VARIABLE} in the ssh configuration"),
        ("IdentityFile %C", "n1: %C in the ssh configuration is not supported"),
    ],
)
def test_an_option_that_would_lead_elsewhere_is_refused(
    tmp_path: Path, line: str, problem: str
) -> None:
    with pytest.raises(HostError, match=re.escape(problem)):
        options_of(tmp_path, line)
    options_of(tmp_path, f"Host other\n{line}")  # another host's


def test_other_options_are_named_once_unless_nothing_depends_on_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ("BindAddress 10.0.0.1", "ProxyUseFdpass no", "BatchMode yes", "ControlPath /c")
    more = ("StrictHostKeyChecking no", "ServerAliveInterval 5", "CheckHostIP yes")
    (tmp_path / "config").write_text("\n".join((*lines, *more)), "utf-8")
    config = SshConfig(str(tmp_path / "config"))
    for name in ("n1", "n2"):
        config.lookup(SshTarget(host=name))
    assert [record.message for record in caplog.records] == [
        f"not read: {key} (ssh configuration, for n1)"
        for key in ("bindaddress", "controlpath", "stricthostkeychecking")
    ]


def test_the_default_file_may_be_missing_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = SshConfig(ssh_config.DEFAULT_CONFIG)
    assert config.lookup(SshTarget(host="N1", port=5)).port == 5
    with pytest.raises(InputError, match="missing: no such file"):
        SshConfig(str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: cannot be read: this is a pipe"):
        SshConfig(str(tmp_path / "pipe"))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Port 7\n", "utf-8")
    assert SshConfig(ssh_config.DEFAULT_CONFIG).lookup(N1).port == 7
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(InputError, match="ssh reads it, and is not installed here"):
        SshConfig(ssh_config.DEFAULT_CONFIG)


def test_a_configuration_that_cannot_be_read_in_time_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(ssh_config, "_TIMEOUT_S", 0.5)
    with pytest.raises(InputError, match="has not read it in"):
        options_of(tmp_path, f"Include {tmp_path}/pipe\n")
