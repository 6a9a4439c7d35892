"""OpenSSH's client configuration, ``ssh_config(5)``: where a name leads, and with which keys.

Files are read as OpenSSH reads them. Each line is read, refused, or named once as not read; nothing
is run and no name is resolved, so `Match exec` and the like are never taken as true.
"""

import getpass
import glob
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amp_ray.errors import HostError, InputError, Where, placed, shown
from amp_ray.inputs.hostfile import SshTarget, parse_target
from amp_ray.owners import why_changeable
from amp_ray.runtime.whole_file import read_regular

_LOGGER: Final = logging.getLogger(__name__)
DEFAULT_CONFIG: Final = "~/.ssh/config"
DEFAULT_PORT: Final = 22  # standard port of SSH, RFC 4251
_MAX_PORT: Final = 65535
_MAX_DEPTH: Final = 16  # nested files, READCONF_MAX_DEPTH in OpenSSH's readconf.c
_MAX_FILES: Final = 1000  # so that files that include others several times end
_MAX_BYTES: Final = 2**24

_LINE: Final = re.compile(r'\s*"?(?P<key>[^\s="]+)"?(?:\s*=\s*|\s+)?(?P<rest>.*?)\s*', re.DOTALL)
_WORD: Final = re.compile(
    r"""(?:\\['"\\ ]|"(?:\\["'\\]|[^"])*+"|'(?:\\["'\\]|[^'])*+'|[^ \t"'])++"""
)
_QUOTED: Final = re.compile(
    r"""\\(?P<a>['"\\ ])|"(?P<b>(?:\\["'\\]|[^"])*+)"|'(?P<c>(?:\\["'\\]|[^'])*+)'"""
)

_PROXY: Final = ("proxyjump", "proxycommand")  # whichever comes first counts
_TARGET: Final = frozenset({"hostname", "port", "user", *_PROXY})
_LISTS: Final = ("userknownhostsfile", "globalknownhostsfile")
_ONE_VALUE: Final = frozenset(
    {"hostname", "port", "user", "proxyjump", "identityfile", "hostkeyalias"}
)
_READ: Final = _TARGET | _ONE_VALUE | {*_LISTS}

_REFUSED: Final = {
    "proxycommand": "use ProxyJump",
    "canonicalizehostname": "write host names in full",
    "revokedhostkeys": "mark the keys @revoked in a known_hosts file",
}
"""Options without which we would go elsewhere than ssh, or trust whom it does not."""

_NEUTRAL: Final = {
    "addressfamily": ("any",),
    "canonicalizehostname": ("no",),
    "certificatefile": ("none",),
    "controlpath": ("none",),
    "proxycommand": ("none",),
    "proxyusefdpass": ("no",),
    "revokedhostkeys": ("none",),
    "stricthostkeychecking": ("yes", "ask"),
    "verifyhostkeydns": ("no", "ask"),
}
"""Values that do what we do anyway."""

_HARMLESS: Final = frozenset(
    re.findall(
        r"\w+",
        """
    addkeystoagent batchmode canonicaldomains canonicalizefallbacklocal canonicalizemaxdots
    canonicalizepermittedcnames challengeresponseauthentication checkhostip
    clearallforwardings compression compressionlevel connectionattempts connecttimeout controlmaster
    controlpersist dynamicforward enableescapecommandline enablesshkeysign escapechar
    exitonforwardfailure fingerprinthash forkafterauthentication forwardagent forwardx11
    forwardx11timeout forwardx11trusted gatewayports gssapiauthentication
    gssapidelegatecredentials gssapikeyexchange gssapirenewalforcesrekey gssapitrustdns
    hashknownhosts hostbasedauthentication identitiesonly ignoreunknown ipqos
    kbdinteractiveauthentication kbdinteractivedevices localcommand localforward loglevel logverbose
    nohostauthenticationforlocalhost numberofpasswordprompts obscurekeystroketiming
    passwordauthentication permitlocalcommand permitremoteopen preferredauthentications
    pubkeyauthentication rekeylimit remotecommand remoteforward requesttty serveralivecountmax
    serveraliveinterval sessiontype stdinnull streamlocalbindmask streamlocalbindunlink
    syslogfacility tag tcpkeepalive tunnel tunneldevice updatehostkeys usekeychain visualhostkey
    warnweakcrypto xauthlocation
    """,
    )
)
"""Options on which neither the place, the keys nor the trust of our connections depend."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    where: Where
    key: str  # lower case
    words: tuple[str, ...]  # at least one
    files: tuple[tuple["_Setting", ...], ...] = ()  # contents of the files that Include names

    @property
    def is_neutral(self) -> bool:
        return self.words[0].casefold() in _NEUTRAL.get(self.key, ())


class SshConfig:
    """A configuration; the same value serves all hosts, so each remark is made once."""

    def __init__(self, path: str | None) -> None:
        """Read a file and those that it includes; without a path, no option is set.

        Only the user's default file may be missing.

        Raises:
            InputError: If a file cannot be read, or OpenSSH would refuse one of its lines.
        """
        self._name = path
        self._remarks: set[str] = set()
        self._num_files = 0
        self._settings: tuple[_Setting, ...] = ()
        file = None if path is None else Path(path).expanduser()
        if file is not None and (path != DEFAULT_CONFIG or file.exists()):
            self._settings = self._file(file, 0, is_checked=path == DEFAULT_CONFIG)

    # ------------------------------------------------------------------ files

    def _file(self, path: Path, depth: int, *, is_checked: bool) -> tuple[_Setting, ...]:
        """Read one file; OpenSSH refuses a checked file that other users can change."""
        where = Where(file=str(path))
        self._num_files += 1
        if depth > _MAX_DEPTH or self._num_files > _MAX_FILES:
            message = f"Include is nested more than {_MAX_DEPTH} times, or of too many files"
            raise InputError(message, where=where)
        try:
            reason = why_changeable(path, path.stat()) if is_checked else None
            text = read_regular(path, _MAX_BYTES).decode("utf-8", "surrogateescape")
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            text, reason = "", f"cannot be read: {reason}"
        if reason is not None:
            raise InputError(reason, where=where)
        lines = enumerate(text.split("\n"), start=1)
        return tuple(self._parsed(lines, path, depth))

    def _parsed(
        self, lines: Iterator[tuple[int, str]], path: Path, depth: int
    ) -> Iterator[_Setting]:
        for number, line in lines:
            if not line.strip() or line.strip().startswith("#"):
                continue
            where = Where(file=str(path), line=number)
            with placed(where, ValueError):
                key, words = _key_and_words(line)
            names = words if key == "include" else ()
            paths = [found for name in names for found in self._included(name, path, where)]
            files = tuple(self._file(file, depth + 1, is_checked=True) for file in paths)
            yield _Setting(where=where, key=key, words=words, files=files)

    def _included(self, name: str, including: Path, where: Where) -> list[Path]:
        """Return the files that a pattern names: from ~/.ssh, else beside a file elsewhere."""
        pattern = os.path.expanduser(name)  # noqa: PTH111 - a pattern
        for folder in (Path("~/.ssh").expanduser(), including.parent):
            paths = [Path(path) for path in sorted(glob.glob(os.path.join(folder, pattern)))]  # noqa: PTH118, PTH207 - may be absolute, needs its rules for dots
            if paths:
                return [path for path in paths if not path.is_dir()]
        if not glob.has_magic(pattern):
            self._remark(f"{where}: Include {name}: no such file")
        return []

    def _remark(self, text: str) -> None:
        if text not in self._remarks:
            self._remarks.add(text)
            _LOGGER.warning("%s", text)

    # ------------------------------------------------------------------ lookup

    def lookup(self, target: SshTarget) -> HostOptions:
        """Return the options of a host.

        Raises:
            HostError: If an option that counts for the host is not supported.
        """
        reading = _Reading(target, self._remark)
        reading.read(self._settings, is_active=True)
        if reading.wants_final:
            reading.begin_final()
            reading.read(self._settings, is_active=True)
        return reading.options()


class _Reading:
    """The options that were read so far for one host; the first value of an option counts."""

    def __init__(self, target: SshTarget, remark: Callable[[str], None]) -> None:
        self.wants_final = False
        self._target, self._remark = target, remark
        self._host = target.host
        self._is_final = False
        self._first: dict[str, _Setting] = {}
        self._identities: list[str] = []

    @property
    def _user(self) -> str:
        named = self._first.get("user")
        return self._target.user or (named.words[0] if named else getpass.getuser())

    @property
    def _hostname(self) -> str:
        named = self._first.get("hostname")
        if named is None or self._is_final:
            return self._host
        return _expanded(named, {"h": self._host})

    def begin_final(self) -> None:
        """Prepare the second pass, which `Match final` asks for; it sees the host's real name."""
        self._host = self._hostname.lower()
        self._is_final = True

    def read(self, settings: Sequence[_Setting], *, is_active: bool) -> None:
        """Read the lines of one file, in a block that applies or not."""
        active: bool | None = is_active
        block: _Setting | None = None
        for setting in settings:
            if setting.key == "host":
                active, block = is_active and self._is_host(setting.words), None
            elif setting.key == "match":
                active, block = is_active and self._matches(setting.words), setting
                if active is None:
                    shape = " ".join(setting.words)
                    self._remark(
                        f"{setting.where}: Match {shape} is not read: its block is left out"
                    )
            elif setting.key == "include":
                if active is None and block is not None and any(setting.files):
                    self._refuse(block, setting)
                for file in setting.files:
                    self.read(file, is_active=bool(active))
            elif active:
                self._take(setting)
            elif active is None and block is not None:
                self._pass_over(setting, block)

    def _take(self, setting: _Setting) -> None:
        key = setting.key
        if key == "identityfile":
            if setting.words[0] not in self._identities:
                self._identities.append(setting.words[0])
            return
        slot = "proxy" if key in _PROXY else key
        if slot in self._first:
            return
        self._first[slot] = setting
        if setting.is_neutral or key in _HARMLESS:
            return
        if key in _REFUSED:
            text = f"{setting.where}: {key} is not supported; {_REFUSED[key]}"
            raise HostError(f"{self._target.host}: {text}")
        if key not in _READ:
            self._remark(f"{setting.where}: {key} is not read")

    def _pass_over(self, setting: _Setting, block: _Setting) -> None:
        """Refuse a line that may change where we connect, depending on what is not evaluated."""
        slot = "proxy" if setting.key in _PROXY else setting.key
        if slot not in self._first and setting.key in (*_TARGET, *_REFUSED):
            self._refuse(block, setting)

    def _refuse(self, block: _Setting, setting: _Setting) -> None:
        raise HostError(
            f"{self._target.host}: {block.where}: Match {' '.join(block.words)} is not evaluated, "
            f"and {setting.key} in line {setting.where.line} depends on it; name a configuration "
            "without it as trials.ssh.config"
        )

    def _is_host(self, patterns: Sequence[str]) -> bool:
        named = [text for text in patterns if _is_like(text.removeprefix("!"), self._host)]
        return bool(named) and not any(text.startswith("!") for text in named)

    def _matches(self, words: Sequence[str]) -> bool | None:
        """Return whether all conditions hold; None if that depends on one that is not evaluated."""
        result: bool | None = True
        for name, value, is_negated in _conditions(words):
            if name == "final":
                self.wants_final = True
            holds = self._holds(name, value)
            if holds is None:
                result = result and None
            elif holds is is_negated:
                result = False
        return result

    def _holds(self, name: str, value: str) -> bool | None:
        if name in _WITHOUT_VALUE:
            return name == "all" or self._is_final
        texts = {"user": self._user, "localuser": getpass.getuser()}
        names = {"host": self._hostname.lower(), "originalhost": self._target.host.lower()}
        if name in names:
            return _is_listed(names[name], value.lower())
        return _is_listed(texts[name], value) if name in texts else None

    def options(self) -> HostOptions:
        """Return what was read, with tokens and variables expanded."""
        host, port = self._hostname.lower(), self._port()
        alias = self._first.get("hostkeyalias")
        proxy = self._first.get("proxy")
        tokens = {"h": host, "p": str(port), "r": self._user, "n": self._target.host}
        local = {
            **tokens,
            "d": str(Path.home()),
            "i": str(os.getuid()),
            "k": alias.words[0] if alias else self._target.host,
            "l": socket.gethostname(),
            "L": socket.gethostname().partition(".")[0],
            "u": getpass.getuser(),
        }
        identities = [name for name in self._identities if name.casefold() != "none"]
        return HostOptions(
            host=host,
            port=port,
            user=self._user,
            jumps=() if proxy is None else _jumps(proxy, tokens),
            identities=tuple(_filled(name, local, self._target.host) for name in identities),
            host_key_alias=alias.words[0] if alias else None,
            known_hosts={
                key: tuple(
                    _filled(word, local, self._target.host)
                    for word in self._first[key].words
                    if word != "none"
                )
                for key in _LISTS
                if key in self._first
            },
        )

    def _port(self) -> int:
        named = self._first.get("port")
        return self._target.port or (int(named.words[0]) if named else DEFAULT_PORT)


# ---------------------------------------------------------------------- words


def _key_and_words(line: str) -> tuple[str, tuple[str, ...]]:
    """Return the option of a line, in lower case, and its values.

    Raises `ValueError` if OpenSSH would refuse the line.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"found {shown(line)}; expected an option and its value")
    key, words = match["key"].lower(), _split(match["rest"])
    if not words or (key in _READ and not words[0]):
        raise ValueError(f"{match['key']} has no value")
    if key in _ONE_VALUE and len(words) > 1:
        raise ValueError(f"{match['key']} has one value, found {shown(match['rest'])}")
    if key == "port":
        words = (str(_port(words[0])),)
    if key == "match":
        _conditions(words)
    return key, words


def _split(text: str) -> tuple[str, ...]:
    r"""Split a value into words, without a comment at its end, as OpenSSH's ``argv_split``.

    Example:
        >>> _split(r"a 'b c' d\ e#f # g")
        ('a', 'b c', 'd e#f')
    """
    words, place = [], 0
    while place < len(text) and text[place] != "#":
        match = _WORD.match(text, place)
        if match is None and text[place] not in " \t":
            raise ValueError(f"found {shown(text)}: a quotation mark is not closed")
        if match is not None:
            words.append(_QUOTED.sub(_unquoted, match[0]))
        place = match.end() if match else place + 1
    return tuple(words)


def _unquoted(match: re.Match[str]) -> str:
    inner = match["b"] if match["a"] is None else match["a"]
    return re.sub(r"""\\(["'\\])""", r"\1", match["c"] if inner is None else inner)


def _port(text: str) -> int:
    """Return the number of a port, which may also be the name of a service."""
    try:
        number = int(text) if text.isascii() and text.isdigit() else socket.getservbyname(text)
    except (OSError, ValueError):
        number = 0
    if not 0 < number <= _MAX_PORT:
        raise ValueError(f"found port {shown(text)}; expected 1 to {_MAX_PORT}")
    return number


_WITHOUT_VALUE: Final = ("all", "canonical", "final")


def _conditions(words: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Return name, value and whether it is negated of each condition of a Match line."""
    rest = [part for word in words for part in _assigned(word)]
    conditions = []
    while rest:
        name = rest.pop(0)
        is_negated = name.startswith("!")
        name = name.removeprefix("!").lower()
        value = "" if name in _WITHOUT_VALUE else rest.pop(0) if rest else None
        if value is None:
            raise ValueError(f"Match {name} has no value")
        conditions.append((name, value, is_negated))
    if "all" in [name for name, _, _ in conditions[:-1]]:
        raise ValueError("Match all has no further conditions")
    return conditions


def _assigned(word: str) -> list[str]:
    """Split ``host=a``; a value that has the sign itself comes after its name."""
    name, sign, value = word.partition("=")
    return [name, value] if sign and name.removeprefix("!").isalpha() and value else [word]


def _is_listed(text: str, patterns: str) -> bool:
    """Return whether a text matches a list of patterns with commas, and none after a ``!``."""
    listed = [item for item in patterns.split(",") if _is_like(item.removeprefix("!"), text)]
    return bool(listed) and not any(item.startswith("!") for item in listed)


def _is_like(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern, in which only ``*`` and ``?`` are special."""
    parts = [re.escape(part).replace(r"\?", ".") for part in re.split(r"\*+", pattern)]
    # Atomic groups: a pattern of many stars takes no exponential time
    middle = "".join(f"(?>.*?{part})" for part in parts[1:-1])
    shape = parts[0] + (f"{middle}.*{parts[-1]}" if len(parts) > 1 else "")
    return re.fullmatch(shape, text, re.DOTALL) is not None


def _jumps(proxy: _Setting, tokens: Mapping[str, str]) -> tuple[SshTarget, ...]:
    """Return the jump hosts of a ProxyJump; none for `none` and for a ProxyCommand."""
    if proxy.key == "proxycommand" or proxy.words[0].casefold() == "none":
        return ()
    with placed(proxy.where):
        names = _expanded(proxy, tokens).split(",")
        return tuple(parse_target(name.removeprefix("ssh://")) for name in names)


def _expanded(setting: _Setting, tokens: Mapping[str, str]) -> str:
    with_place = f"{setting.where}: {setting.key}"
    return _filled(setting.words[0], tokens, with_place, variables=False)


def _filled(text: str, tokens: Mapping[str, str], place: str, *, variables: bool = True) -> str:
    """Replace ``%h`` and the like, and variables of the environment."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        known = {"%": "%", **tokens}.get(name) if match[1] else os.environ.get(name)
        if known is None:
            raise HostError(f"{place}: {match[0]} is not supported, or not set")
        return known

    shape = r"%(.?)|\$\{(\w+)\}" if variables else r"%(.?)"
    return re.sub(shape, value, text)
