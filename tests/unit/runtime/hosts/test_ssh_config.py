"""OpenSSH's configuration: the same answers as `ssh -G`, and one line about all else."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.runtime.hosts import ssh_config
from amp_ray.runtime.hosts.ssh_config import HostOptions, SshConfig

N1 = SshTarget(host="n1")


def options_of(folder: Path, text: str, target: SshTarget = N1) -> HostOptions:
    file = folder / "config"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return SshConfig(str(file)).lookup(target)


def ask_ssh(file: Path, name: str) -> subprocess.CompletedProcess[str]:
    words = [shutil.which("ssh") or "", "-G", "-F", str(file), name]
    return subprocess.run(words, capture_output=True, text=True, check=False)


HOSTS = ("n1", "n2", "gw.example.org", "10.0.0.7")
PATTERNS = ("*", "n?", "n1", "!n1", "*.example.org", "[n]1", "10.0.*", "Gw*", "real-n1")
words = st.sampled_from(PATTERNS)
listed = st.lists(words, min_size=1, max_size=3).map(",".join)
condition = st.one_of(
    st.tuples(
        st.sampled_from(["host", "originalhost", "user", "localuser", "!host", "Host", "!user"]),
        listed | st.sampled_from(["ada", "root", "!ada,*"]),
    ).map(" ".join),
    st.sampled_from(["final", "canonical", "!final", "!canonical"]),
)
block = st.one_of(
    st.lists(words, min_size=1, max_size=3).map(lambda names: "Host " + " ".join(names)),
    st.lists(condition, min_size=1, max_size=3).map(lambda parts: "Match " + " ".join(parts)),
    st.sampled_from(
        [
            "Match all",
            "Match user ada all",
            "Match !all",
            "Match final all",
            "match canonical all",
            "Host = n1 # near",
        ]
    ),
)
option = st.sampled_from(
    [
        *("HostName 127.0.0.1", "HostName real-%h", "hostname=Other", 'HostName "quoted"'),
        *("Port 41001", "Port = 7", "port ssh", "User ada", "User\tbob", 'User "a b"'),
        *(
            "IdentityFile key",
            "IdentityFile 'a key'",
            "IdentityFile k\\ 2 # old",
            "IdentityFile none",
        ),
        *("ProxyJump gw", "ProxyJump none", "ProxyJump ada@gw:2222,far", "ProxyCommand none"),
        *("ConnectTimeout 3", "# a comment", "", "HostKeyAlias alias", "Include INCLUDED"),
    ]
)
text_of = st.lists(block | option | option, min_size=1, max_size=9).map("\n".join)


def ssh_says(file: Path, target: SshTarget) -> dict[str, list[str]]:
    name = target.host if target.user is None else f"{target.user}@{target.host}"
    ended = ask_ssh(file, name)
    assert ended.returncode == 0, ended.stderr
    answers: dict[str, list[str]] = {}
    for line in ended.stdout.splitlines():
        key, _, value = line.partition(" ")
        answers.setdefault(key, []).append(value)
    return answers


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=text_of,
    included=text_of.filter(lambda text: "Include" not in text),
    host=st.sampled_from(HOSTS),
    user=st.sampled_from([None, "ada"]),
)
def test_a_configuration_means_what_ssh_says(
    tmp_path: Path, text: str, included: str, host: str, user: str | None
) -> None:
    other = tmp_path / "included"
    other.write_text(included + "\n", encoding="utf-8")
    other.chmod(0o600)
    target = SshTarget(host=host, user=user)
    options = options_of(tmp_path, text.replace("INCLUDED", str(other)) + "\n", target)
    said = ssh_says(tmp_path / "config", target)
    assert options.host == said["hostname"][0]
    assert options.port == int(said["port"][0])
    assert options.user == said["user"][0]
    assert (options.host_key_alias or "") == said.get("hostkeyalias", [""])[0]
    jumps = [_shown(jump) for jump in options.jumps]
    assert ",".join(jumps) == said.get("proxyjump", [""])[0]
    files = [name for name in said.get("identityfile", []) if name != "none"]
    defaults = all(name.startswith("~/.ssh/id_") for name in files)
    assert list(options.identities) == ([] if defaults else files)


def _shown(jump: SshTarget) -> str:
    user = "" if jump.user is None else f"{jump.user}@"
    return f"{user}{jump.host}" + ("" if jump.port is None else f":{jump.port}")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Port 0", "found port '0'; expected 1 to 65535"),
        ("Port 70000", "found port '70000'"),
        ("Port 22x", "found port '22x'"),
        ("Host other\nPort no", "found port 'no'"),
        ('HostName ""', "HostName has no value"),
        ("HostName", "HostName has no value"),
        ("HostName a b", "HostName has one value, found 'a b'"),
        ("User 'ada", "a quotation mark is not closed"),
        ("= x", "expected an option and its value"),
        ("Match", "Match has no value"),
        ("Match host", "Match host has no value"),
        ("Match all host n1", "Match all has no further conditions"),
        ("Host", "Host has no value"),
        ("HostName \x1b[31m\udcff 'x", "a quotation mark is not closed"),
    ],
)
def test_a_line_that_openssh_refuses_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        options_of(tmp_path, f"# first\n{line}\n")
    number = 2 + line.count("\n")
    assert str(caught.value).startswith(f"{tmp_path}/config:{number}: ")
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()
    if shutil.which("ssh"):
        assert ask_ssh(tmp_path / "config", "n1").returncode == 255


UNCLEAR = 'Match exec "test -e /near"', "Match localnetwork 10.0.0.0/8", "Match version OpenSSH_*"


@pytest.mark.parametrize("match", [*UNCLEAR, "Match tagged x originalhost n1", "Match !command ls"])
@pytest.mark.parametrize("line", ["HostName x", "Port 7", "User bob", "ProxyJump gw"])
def test_a_condition_that_is_not_evaluated_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, match: str, line: str
) -> None:
    with pytest.raises(HostError, match=r"config:2: Match .* is not evaluated, and .* in line 3"):
        options_of(tmp_path, f"\n{match}\n{line}\n")
    first = f"Host n1\n  {line}\n{match}\n  {line}9\n  ForwardAgent yes\n"
    caplog.clear()
    assert options_of(tmp_path, first) == options_of(tmp_path, first[: first.index("Match")])
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/config:3: {match.replace(chr(34), '')} is not read: its block is left out"
    ]
    options_of(tmp_path, f"{match} originalhost other\n{line}\n")  # false, whatever the rest is


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ProxyCommand nc %h %p", "proxycommand is not supported; use ProxyJump"),
        ("CanonicalizeHostname yes", "canonicalizehostname is not supported; write host names"),
        ("RevokedHostKeys /k", "revokedhostkeys is not supported; mark the keys @revoked"),
        ("HostName %x", "config:1: hostname: %x is not supported, or not set"),
        ("IdentityFile ${NO_SUCH_VARIABLE}/k", "${NO_SUCH_VARIABLE} is not supported, or not set"),
        ("ProxyJump a b;c", "config:1: ProxyJump has one value"),
        ("ProxyJump b;c", "config:1: found host 'b;c'"),
    ],
)
def test_an_option_that_would_lead_elsewhere_is_refused(
    tmp_path: Path, line: str, problem: str
) -> None:
    with pytest.raises((HostError, InputError), match=re.escape(problem)):
        options_of(tmp_path, line)
    options_of(tmp_path, f"Host other\n{line.replace('a b;c', 'b;c')}")  # another host's


def test_other_options_are_named_once_unless_nothing_depends_on_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ("BindAddress 10.0.0.1", "ProxyUseFdpass no", "ControlPath none", "BatchMode yes")
    (tmp_path / "config").write_text("\n".join((*lines, "ControlPath /c", "Typo 1")), "utf-8")
    config = SshConfig(str(tmp_path / "config"))
    for name in ("n1", "n2"):
        config.lookup(SshTarget(host=name))
    assert [record.message.rpartition("/")[2] for record in caplog.records] == [
        "config:1: bindaddress is not read",
        "config:6: typo is not read",
    ]


def test_files_are_included_from_the_home_folder_or_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    nested = tmp_path / ".ssh" / "conf.d"
    nested.mkdir(parents=True)
    (nested / "b").write_text("Port 2\n", "utf-8")
    (nested / "a").write_text("Host n2\n  Port 1\nHost *\n  Include ~/.ssh/last\n", "utf-8")
    (tmp_path / ".ssh" / "last").write_text("User ada\n", "utf-8")
    (tmp_path / "beside").write_text("HostName h\n", "utf-8")
    text = "Host n1\n  Include conf.d/* beside nothing-*\nHost n2\n  Port 3\n"
    options = options_of(tmp_path, text)
    assert (options.host, options.port, options.user) == ("h", 2, "ada")
    assert options_of(tmp_path, text, SshTarget(host="n2")).port == 3
    (tmp_path / ".ssh" / "config").write_text("Include conf.d/b\n", "utf-8")
    assert SshConfig(ssh_config.DEFAULT_CONFIG).lookup(SshTarget(host="x")).port == 2


def test_a_file_that_others_can_change_or_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    default = tmp_path / ".ssh" / "config"
    for path, text in ((tmp_path / "other", f"Include {tmp_path}/other\n"), (default, "")):
        path.write_text("", "utf-8")
        path.chmod(0o666)
        with pytest.raises(InputError, match=f"{path}: every user may write to it|{path}: "):
            options_of(tmp_path, text) if text else SshConfig(ssh_config.DEFAULT_CONFIG)
    (tmp_path / "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: cannot be read: this is a pipe"):
        options_of(tmp_path, f"Include {tmp_path}/pipe\n")
    with pytest.raises(InputError, match="missing: cannot be read: No such file"):
        SshConfig(str(tmp_path / "missing"))


@pytest.mark.parametrize("line", ["Include {0}\n", "Include {0} {0} {0}\nInclude {0}\n"])
def test_files_that_include_themselves_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(InputError, match="Include is nested more than 16 times"):
        options_of(tmp_path, line.format(tmp_path / "config"))


def test_a_pattern_of_many_stars_takes_no_exponential_time(tmp_path: Path) -> None:
    host = SshTarget(host="a" * 200)
    assert options_of(tmp_path, f"Host {'*a' * 60}*b\n  Port 7\n", host).port == 22
