"""Removal of secrets from files and output: rules that recognise them, and their replacement.

A secret is recognised by the name of its variable, key or flag, by the prefix of tokens of
well-known services, and by its place in a URL. Code that has the experiment or launch also removes
the secret values themselves.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

NOT_KEPT: Final = "(not kept: it looks secret)"  # in place of a secret

_WORDS: Final = "TOKEN(?!IZ)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE"
_VARIABLE: Final = re.compile(_WORDS, re.IGNORECASE)

# Names of keys and flags; `tokens`, `--pad-token` and `num_key_value_heads` are no secrets.
# Every repetition is bounded, since hosts and programs write the searched text
_NAME: Final = (
    r"(?<![\w.-])[\w.-]{0,64}?(?<!pad.)(?<!eos.)(?<!bos.)(?<!unk.)(?<!mask.)(?<!sep.)(?<!cls.)(?<!per.)"
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|cookie|auth|apikey|"
    r"(?:api|access|private|secret|auth|signing|encryption|account)[_-]?key)(?![\w-])"
)
_UPPER: Final = (
    rf"(?<![\w-])(?=[A-Z0-9_]{{0,64}}(?:{_WORDS}))(?!KEY\b)[A-Z_][A-Z0-9_]{{0,128}}(?![\w-])"
)
_VALUE: Final = r"(?!['\"]?\(not kept)(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;)\]}]+)"

_PATTERNS: Final = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"((?i:{_NAME})|{_UPPER})(\s{{0,8}}=\s{{0,8}}(?!=)|['\"]?\s{{0,8}}:\s{{0,8}}(?=['\"])){_VALUE}",
        rf"((?=-)(?i:{_NAME}))(\s{{1,8}}(?!-)){_VALUE}",
        r"((?i:\bbearer))(\s+)([\w.~+/-]{8,}=*)",
    )
)
"""In commands, logs and messages: the text before a secret, the separator, and the secret."""

_TOKENS: Final = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        (
            r"()()((?<![A-Za-z0-9])(?:"
            r"hf_(?:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}|[A-Za-z0-9]{14,})(?![A-Za-z0-9_])|"
            r"sk-(?:(?=[a-z_-]*[A-Z0-9])[\w-]{8,}|[\w-]{14,})|"
            r"(?:gh[pousr]_|github_pat_|glpat-|xox[a-z]-)[\w-]{4,}|(?:AKIA|ASIA)[A-Z0-9]{8,}))"
        ),
        r"(://[^\s/:@'\"]{0,256})(:)(?!\(not kept)([^\s/'\"]{1,1024})(?=@)",
    )
)
"""The same for secrets that are recognised anywhere, also in data and source code."""

_HINTS: Final = (
    *("token", "key", "secret", "passw", "passphrase", "credential", "auth", "cookie", "bearer"),
    *("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox"),
    *("akia", "asia", "://"),
)
"""In lower case; a text without any of them matches no pattern."""

_FLAG: Final = re.compile(rf"(?=-)(?i:{_NAME})", re.ASCII)
_KEY: Final = re.compile(rf"(?i:{_NAME})", re.ASCII)
_ENVIRONMENT: Final = "environment"  # the key whose entries are variables
_SHORTEST: Final = 6  # characters of the shortest removed value: `true` is too common


def is_secret(name: str) -> bool:
    """Return whether a variable's value is secret, judged by its name.

    Example:
        >>> is_secret("HF_TOKEN"), is_secret("aws_secret_access_key"), is_secret("NCCL_DEBUG")
        (True, True, False)
    """
    return _VARIABLE.search(name) is not None


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without likely secrets and known secrets.

    Example:
        >>> redact("run --wandb-token abc --tokens 5")
        'run --wandb-token (not kept: it looks secret) --tokens 5'
    """
    return _replaced(_without(text, secrets), (*_TOKENS, *_PATTERNS))


def redact_data(data: bytes, secrets: Iterable[str], *, is_log: bool) -> bytes:
    """Return the bytes of a file without secrets; code in it still runs."""
    text = data.decode("latin-1")  # byte by byte
    as_read = [secret.encode().decode("latin-1") for secret in secrets]
    patterns = (*_TOKENS, *_PATTERNS) if is_log else _TOKENS
    redacted = _replaced(_without(text, as_read), patterns)
    return data if redacted == text else redacted.encode("latin-1")


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets.

    Example:
        >>> redact_words(["--wandb-token", "abc", "--lr", "1"])
        ['--wandb-token', '(not kept: it looks secret)', '--lr', '1']
    """
    return [
        NOT_KEPT if is_after_flag else redact(word) for word, is_after_flag in _after_flags(words)
    ]


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables as they may be written to a file."""
    return {
        name: NOT_KEPT if is_secret(name) else redact(text) for name, text in environment.items()
    }


def redact_values(value: Any, secrets: Iterable[str] = (), key: str = "") -> Any:  # noqa: ANN401
    """Return plain values of a file or a result without secrets; ``key`` leads to them."""
    if isinstance(value, Mapping):
        is_wrong = is_secret if key == _ENVIRONMENT else _KEY.fullmatch
        return {
            name: NOT_KEPT
            if entry is not None
            and (key == _ENVIRONMENT or not isinstance(entry, Mapping | list))
            and is_wrong(str(name))
            else redact_values(entry, secrets, str(name))
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        if all(isinstance(entry, str) for entry in value):
            return [_without(word, secrets) for word in redact_words(value)]
        return [redact_values(entry, secrets, key) for entry in value]
    return redact(value, secrets) if isinstance(value, str) else value


def redact_at(path: Sequence[object], value: Any) -> Any:  # noqa: ANN401 - plain values
    """Return the value at a path of a file without secrets."""
    for part in reversed(path):
        value = {str(part): value}
    value = redact_values(value)
    for part in path:
        value = value[str(part)] if isinstance(value, Mapping) else value
    return value


def secrets_of(environment: Mapping[str, str], words: Sequence[str]) -> frozenset[str]:
    """Return the secret values of a command, to remove them from its files."""
    secrets = {text for name, text in environment.items() if is_secret(name)}
    secrets |= {word for word, is_after_flag in _after_flags(words) if is_after_flag}
    for text in (*environment.values(), *words):
        for pattern in (*_PATTERNS, *_TOKENS):
            secrets |= {match[3].strip("'\"") for match in pattern.finditer(text)}
    return frozenset(text for text in secrets if len(text) >= _SHORTEST and NOT_KEPT not in text)


def _after_flags(words: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield words, and whether they are the secret value of a flag."""
    before = ""
    for word in words:
        yield word, _FLAG.fullmatch(before) is not None and not word.startswith("-")
        before = word


def _without(text: str, secrets: Iterable[str]) -> str:
    """Replace known secrets, the longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, NOT_KEPT)
    return text


def _replaced(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """Replace matches line by line; most lines of a log lack the patterns' words."""
    if not _may_have_secrets(text):
        return text
    return "\n".join(_line(line, patterns) for line in text.split("\n"))


def _line(line: str, patterns: Sequence[re.Pattern[str]]) -> str:
    if _may_have_secrets(line):
        for pattern in patterns:
            line = pattern.sub(rf"\1\2{NOT_KEPT}", line)
    return line


def _may_have_secrets(text: str) -> bool:
    lower = text.lower()
    return any(hint in lower for hint in _HINTS)
