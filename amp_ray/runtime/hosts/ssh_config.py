"""OpenSSH's client configuration, ``ssh_config(5)``: where a name leads, and with which keys.

``ssh -G`` reads it, so a name leads where ``ssh`` leads. An option that we do not follow is refused
if we would go elsewhere or trust other keys without it, and is named once as not read otherwise.
No command of a configuration is run: ``Match exec`` gives its command to the program in ``SHELL``.
"""

import getpass
import glob
import logging
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from amp_ray.errors import HostError, InputError, Where, placed, printable
from amp_ray.inputs.hostfile import SshTarget, parse_target
from amp_ray.runtime.files import read_text
from amp_ray.shipped import Table, Words

_LOGGER: Final = logging.getLogger(__name__)
DEFAULT_CONFIG: Final = "~/.ssh/config"
DEFAULT_PORT: Final = 22  # standard port of SSH, RFC 4251
_TIMEOUT_S: Final = 60.0  # for 10 ms of work; a pipe that a file includes would wait for ever

_Options = Mapping[str, tuple[str, ...]]  # values by option in lower case

_MOST_WORDS: Final = 16  # most words of a file's name
_LISTS: Final = ("userknownhostsfile", "globalknownhostsfile")
_READ: Final = frozenset(
    {"host", "hostname", "port", "user", "proxyjump", "identityfile", "hostkeyalias", *_LISTS}
)


class _Table(Table):
    """The file `ssh_options.yaml`, which describes its fields."""

    file = "runtime/hosts/ssh_options.yaml"
    refused: dict[str, str]
    neutral: dict[str, str]
    harmless: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of one host."""

    host: str  # name or address to connect to
    port: int
    user: str
    jumps: tuple[SshTarget, ...]  # jump hosts, the first one nearest to this machine
    identities: tuple[str, ...]  # private key files; empty if none is named
    host_key_alias: str | None
    known_hosts: Mapping[str, tuple[str, ...]]  # by the key of `_LISTS`, where the file names any


class SshConfig:
    """A configuration; the same value serves all hosts, so each remark is made once."""

    def __init__(self, path: str | None) -> None:
        """Find a file and the program that reads it; without a path, no option is set.

        Only the user's default file may be missing.

        Raises:
            InputError: If there is no such file, or no ``ssh`` to read it.
        """
        self._remarks: set[str] = set()
        self._file: Path | None = None
        self._text: str | None = None
        if path is None:
            return
        file = Path(path).expanduser()
        is_users = path == DEFAULT_CONFIG and _is_in_home(file)
        if path == DEFAULT_CONFIG and not file.exists() and not (is_users and _ssh()):
            return
        if not _ssh():
            message = "ssh reads it, and is not installed here: install it (openssh-client), or"
            raise InputError(f"{message} set trials.ssh.config: null", where=Where(file=str(file)))
        self._file = file
        # Its own defaults include the file of the machine, and that others may not change them
        self._text = None if is_users else _with_places(read_text(file), file.parent)

    def lookup(self, target: SshTarget) -> HostOptions:
        """Return the options of a host.

        Raises:
            InputError: If OpenSSH refuses the configuration.
            HostError: If an option that counts for the host is not supported.
        """
        if self._file is None:
            return _host_options(target, {}, {})
        options = self._asked(target, "false")
        self._check(target.host, options, self._asked(target, "true"))
        return _host_options(target, options, self._defaults)

    def _asked(self, target: SshTarget, runs: str) -> _Options:
        with placed(Where(file=str(self._file))):
            return _asked(self._text, target, runs)

    @cached_property
    def _defaults(self) -> _Options:
        return _asked("", SshTarget(host="localhost"), "false")

    def _check(self, host: str, options: _Options, if_true: _Options) -> None:
        """Refuse what we do not follow, and name what we do not read.

        Args:
            host: Name of the host.
            options: Its options if the command of every ``Match exec`` fails.
            if_true: Its options if every one succeeds.
        """
        table = _Table.shipped()
        read = {*options, *if_true, *self._defaults}
        for key in sorted(read.difference(table.harmless, ["host"])):
            values = options.get(key)
            if values != if_true.get(key):
                message = "depends on the command of a Match exec in the ssh configuration"
                advice = "which is not run; name one without it as trials.ssh.config"
                raise HostError(f"{host}: {key} {message}, {advice}")
            if values in (self._defaults.get(key), (table.neutral.get(key),)) or key in _READ:
                continue
            if key in table.refused:
                text = f"{key} of the ssh configuration is not supported; {table.refused[key]}"
                raise HostError(f"{host}: {text}")
            if key not in self._remarks:
                self._remarks.add(key)
                _LOGGER.warning("not read: %s (ssh configuration, for %s)", key, host)


def _ssh() -> str | None:
    return shutil.which("ssh")


def _is_in_home(file: Path) -> bool:
    """Return whether this is the file that ssh takes by itself, whatever HOME says."""
    return file == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "config"


def _with_places(text: str, folder: Path) -> str:
    """Return a configuration that includes files beside it, where ~/.ssh has none of that name."""

    def place(match: re.Match[str]) -> str:
        word = match[0]
        is_beside = not glob.glob(os.path.expanduser(f"~/.ssh/{word}")) and folder.glob(word)  # noqa: PTH111, PTH207 - a pattern
        return f'"{folder.absolute()}/{word}"' if is_beside and any(is_beside) else word

    return re.sub(
        r"(?im)^\s*include[ \t=].*",
        lambda line: re.sub(r"(?<=[\s=])[^\s=~/\"'][^\s\"']*(?=\s|$)", place, line[0]),
        text,
    )


def _asked(text: str | None, target: SshTarget, runs: str) -> _Options:
    """Return what ``ssh -G`` prints.

    Args:
        text: The configuration; None for the user's and the machine's.
        target: The host.
        runs: The program that gets the commands of ``Match exec``.
    """
    if text is None:
        return _printed((), target, runs)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="ssh-config-") as copy:
        copy.write(text)
        copy.flush()
        try:
            return _printed(("-F", copy.name), target, runs)
        except ValueError as error:
            names = re.compile(rf"{re.escape(copy.name)}:? (?=line )|{re.escape(copy.name)}: ")
            raise InputError(names.sub("", str(error))) from None


def _printed(words: Sequence[str], target: SshTarget, runs: str) -> _Options:
    login = [] if target.user is None else ["-l", target.user]
    port = [] if target.port is None else ["-p", str(target.port)]
    process = subprocess.Popen(
        [_ssh() or "ssh", "-T", "-G", *words, *login, *port, "--", target.host],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "SHELL": shutil.which(runs) or f"/bin/{runs}"},
        start_new_session=True,
    )
    try:
        output, problem = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise InputError(f"ssh -G {target.host} has not read it in {_TIMEOUT_S:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = problem.decode("utf-8", "replace").splitlines()
        raise InputError(f"ssh cannot read it: {printable('; '.join(lines))}")
    options: dict[str, tuple[str, ...]] = {}
    for line in output.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        options[key.lower()] = (*options.get(key.lower(), ()), value)
    return options


def _host_options(target: SshTarget, options: _Options, defaults: _Options) -> HostOptions:
    """Return options by their meaning, with tokens and variables expanded.

    Args:
        target: The host.
        options: What ``ssh -G`` prints for it.
        defaults: The same without a configuration.
    """

    def first(key: str, default: str) -> str:
        return options.get(key, (default,))[0]

    host = first("hostname", target.host).lower()
    port = target.port or int(first("port", str(DEFAULT_PORT)))
    user = target.user or first("user", getpass.getuser())
    alias = options.get("hostkeyalias", (None,))[0]
    name = socket.gethostname()
    remote = {"h": host, "p": str(port), "r": user, "n": target.host}
    local = {
        **remote,
        "d": str(Path.home()),
        "i": str(os.getuid()),
        "k": alias or target.host,
        "l": name,
        "L": name.partition(".")[0],
        "u": getpass.getuser(),
    }
    named = {key: values for key, values in options.items() if values != defaults.get(key)}
    return HostOptions(
        host=host,
        port=port,
        user=user,
        jumps=_jumps(first("proxyjump", "none"), remote, target.host),
        identities=tuple(
            _filled(file, local, target.host)
            for file in named.get("identityfile", ())
            if file != "none"
        ),
        host_key_alias=alias,
        known_hosts={
            key: _files(_filled(named[key][0], local, target.host))
            for key in _LISTS
            if key in named and named[key][0] != "none"
        },
    )


def _files(text: str) -> tuple[str, ...]:
    """Divide names of files: ``ssh -G`` prints them without quotes, also where they have spaces.

    Words that are together the name of a file are one name.
    """
    words, files = text.split(" "), list[str]()
    while words:
        names = [" ".join(words[:end]) for end in range(_MOST_WORDS, 0, -1)]
        name = next(filter(_is_file, names), words[0])
        files.append(name)
        words = words[len(name.split(" ")) :]
    return tuple(filter(None, files))


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError):  # too long, or of no user
        return False


def _jumps(proxy: str, tokens: Mapping[str, str], host: str) -> tuple[SshTarget, ...]:
    """Return the jump hosts of a ProxyJump."""
    if proxy.casefold() == "none":
        return ()
    with placed(Where(file=f"{host}: ProxyJump")):
        names = _filled(proxy, tokens, host, variables=False).split(",")
        return tuple(parse_target(name.removeprefix("ssh://")) for name in names)


def _filled(text: str, tokens: Mapping[str, str], host: str, *, variables: bool = True) -> str:
    """Replace ``%h`` and the like, and variables of the environment."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        text = {"%": "%", **tokens}.get(name) if match[1] else os.environ.get(name)
        if text is None:
            raise HostError(f"{host}: {match[0]} in the ssh configuration is not supported")
        return text

    shape = r"%(.?)|\$\{(\w+)\}" if variables else r"%(.?)"
    return re.sub(shape, value, text)
