"""With hosts that are this machine; tests/hosts runs the program over SSH."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.runtime.hosts.host import LocalHost

RunMain = Callable[..., Result]

SHOW_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


class Host(LocalHost):
    """This machine under another name; the host called ``dead`` never answers."""

    def run(
        self, argv: Sequence[str], *, timeout_s: float, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        if self.name == "dead":
            message = "dead: no answer within 10 s"
            raise HostError(message)
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("on_every_node")


@pytest.fixture
def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunMain:
    monkeypatch.setattr(script, "SshHost", lambda name, _settings: Host(name))

    def run_on(hosts: str, *arguments: str) -> Result:
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.split()), "utf-8")
        argv = ["--hostfile", str(hostfile), *arguments]
        result = CliRunner().invoke(script.on_every_node, argv, standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return result

    return run_on


def test_every_line_has_its_host_in_front(run: RunMain) -> None:
    lines = run("a b", "printf", "%s\\n", "x", "y").stdout.splitlines()
    assert sorted(lines) == ["a: x", "a: y", "b: x", "b: y"]


def test_arguments_arrive_exactly(run: RunMain) -> None:
    words = ["a b", "$HOME", "*", ";", "'\"", "--flag", "", '{"a": [1, 2]}', "é", "-x"]
    result = run("a", sys.executable, "-c", SHOW_ARGUMENTS, *words)
    assert json.loads(result.stdout.removeprefix("a: ")) == words


def test_options_of_the_command_are_not_ours(run: RunMain) -> None:
    result = run("a", "echo", "--hostfile", "--timeout", "--help")
    assert result.stdout == "a: --hostfile --timeout --help\n"


def test_the_exit_code_is_zero_if_all_are(run: RunMain) -> None:
    result = run("a b", "true")
    assert result.return_value == 0
    assert result.stderr == "a: exit code 0\nb: exit code 0\n"


def test_one_failure_fails_and_is_named(run: RunMain) -> None:
    result = run("a dead b", "true")
    assert result.return_value == 1
    assert "a: exit code 0\ndead: no exit code: dead: no answer within 10 s\n" in result.stderr


def test_an_exit_code_is_told_as_it_is(run: RunMain) -> None:
    result = run("a", "sh", "-c", "exit 3")
    assert result.return_value == 1
    assert result.stderr == "a: exit code 3\n"


def test_a_command_that_is_not_there_says_so(run: RunMain) -> None:
    result = run("a", "no-such-program")
    assert "a: exit code 127" in result.stderr
    assert "not found" in result.stdout


def test_errors_stand_among_the_output_where_they_came(run: RunMain) -> None:
    result = run("a", "sh", "-c", "echo 1; echo 2 >&2; echo 3")
    assert result.stdout == "a: 1\na: 2\na: 3\n"


def test_a_command_that_takes_too_long_is_ended(run: RunMain) -> None:
    result = run("a", "--timeout", "0.2", "sh", "-c", "echo before; sleep 60; echo after")
    assert result.return_value == 1
    assert result.stdout in {"a: before\n", ""}  # a busy machine may not even begin in time
    assert "time limit of 0.2 s" in result.stderr


def test_hosts_run_at_the_same_time(run: RunMain, tmp_path: Path) -> None:
    # Each waits for the other's file, so that one after the other would never end well.
    meet = f'cd {tmp_path}; touch "$$"; until [ "$(ls | grep -c "^[0-9]*$")" -ge 2 ]; do :; done'
    assert run("a b", "--timeout", "600", "sh", "-c", meet).return_value == 0


def test_a_host_is_not_asked_before_all_names_are_read(run: RunMain, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stands here and on line 1"):
        run("a a", "touch", str(tmp_path / "touched"))
    assert not (tmp_path / "touched").exists()


def test_ssh_settings_are_handed_on(
    script: ModuleType, run: RunMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SshSettings] = []

    def make(name: str, settings: SshSettings) -> Host:
        seen.append(settings)
        return Host(name)

    monkeypatch.setattr(script, "SshHost", make)
    options = ["--identity", "key", "--user", "ada", "--known-hosts", "hosts"]
    run("a", *options, "true")
    assert seen == [SshSettings(identities=("key",), user="ada", known_hosts="hosts")]
