"""The folder of a trial: inputs, events, collected files, and a script to run it by hand."""

import fnmatch
import json
import os
import shlex
import shutil
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import printable
from amp_ray.redaction import (
    NOT_KEPT,
    is_secret,
    redact,
    redact_data,
    redact_values,
    redact_words,
    without_secrets,
)
from amp_ray.runtime.files import private, read_text
from amp_ray.runtime.hosts.agent.job import MAX_FILES, RANK_LOG
from amp_ray.runtime.hosts.agent.resources import FOLDER_VARIABLE
from amp_ray.runtime.hosts.agent.wire import is_plain_name, unpack
from amp_ray.runtime.whole_file import write_whole
from amp_ray.trials.launch import FOLDER, TIMELINE_FILE, Launch
from amp_ray.trials.outcome import Outcome, outcome_to_json

COLLECT_BYTES: Final = 16 * 1024 * 1024  # limit per file; of a longer one, the end is kept
COLLECT_BYTES_IN_ALL: Final = 512 * 1024 * 1024  # limit per host for logs; the same for other files
_SPARE_BYTES: Final = 64 * 1024
_SHOWN: Final = 100  # maximum characters of a host's file name in a message
_FOLDER_MODE: Final = 0o700  # only the folder's owner may read logs and commands
_MODE: Final = 0o600
_LAUNCH: Final = "launch.json"
_HOSTS: Final = "hosts"
_RERUN_HEAD: Final = """#!/bin/sh
# Trial {trial_id} by hand: copy files/ to every host, set FOLDER to where it is there, and start
# each command below on its host, all at the same time. Address and port are those of the last run.
"""


class HostFiles(Mapping[str, bytes]):
    """Collected files of one host as a mapping from name to content, read from disk on access."""

    def __init__(self, folder: Path, patterns: Sequence[str], ranks: Sequence[int]) -> None:
        """Make the folder, whose parent must be writable for this user only.

        Only files that match one of ``patterns`` are accepted, and only the logs of ``ranks``.
        """
        folder.mkdir(mode=_FOLDER_MODE, parents=True)
        self._path, self._patterns = folder, tuple(patterns)
        self._logs = {f"rank-{rank}.log" for rank in ranks}
        self._max_files = MAX_FILES + len(ranks)
        self._room = 2 * COLLECT_BYTES_IN_ALL + _SPARE_BYTES * len(ranks)
        self._sizes: dict[str, int] = {}
        self._open: str | None = None  # name of the file whose next piece is expected

    def __getitem__(self, name: str) -> bytes:
        if name not in self:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._sizes and name != self._open

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._sizes if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, message: Mapping[str, Any]) -> None:
        """Write the next piece of a file; raise `ValueError` if the file was not requested."""
        name = message["name"]
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._open is None:
            self._check(name)
            flags |= os.O_CREAT | os.O_EXCL
        elif self._open != name:
            text = f"a piece of {name[:_SHOWN]!r} in the middle of {self._open!r}"
            raise ValueError(text)
        data = unpack(message["data"])
        size = self._sizes.get(name, 0) + len(data)
        self._room -= len(data)
        if size > COLLECT_BYTES + _SPARE_BYTES or self._room < 0:
            text = f"more than {COLLECT_BYTES} bytes of {name!r}, or too much of all files"
            raise ValueError(text)
        with os.fdopen(os.open(self._path / name, flags, _MODE), "ab") as file:
            file.write(data)
        self._sizes[name] = size
        self._open = None if message["last"] else name

    def redact(self, secrets: Collection[str]) -> None:
        """Replace secrets in all files; call it after the last piece."""
        for name in self._sizes:
            data = self._read(name)
            kept = redact_data(data, secrets, is_log=name in self._logs)
            if kept != data:
                write_whole(self._path / name, [kept], mode=_MODE)

    def _read(self, name: str) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._path / name, flags), "rb") as file:
            return file.read()

    def _check(self, name: str) -> None:
        """Refuse a name that was not requested, or that could be outside the folder."""
        is_requested = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        foreign = RANK_LOG.fullmatch(name) and name not in self._logs
        if not is_plain_name(name) or not is_requested or foreign:
            text = f"a file {name[:_SHOWN]!r}, where {', '.join(self._patterns)} is wanted"
            raise ValueError(text)
        if name in self._sizes or len(self._sizes) >= self._max_files:
            raise ValueError(f"{name!r} twice, or more than {self._max_files} files")


class TrialFolder:
    """The folder of one trial on this machine.

    ========================  =======================================================
    ``launch.json``           commands, environment, limits, as requested
    ``files/``                the files that every host gets
    ``rerun.sh``              each rank's command, ready to copy
    ``events.jsonl``          messages of the agents, in order
    ``hosts/NAME/``           files collected from a host, such as logs of ranks
    ``outcome.json``          the outcome; written last
    ========================  =======================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=_FOLDER_MODE, parents=True)
        self._host_files: dict[str, HostFiles] = {}

    def write_launch(self, launch: Launch) -> None:
        """Write ``launch.json`` and the files that hosts get."""
        record = {
            "trial_id": launch.trial_id,
            "timeout_s": launch.timeout_s,
            "cwd": launch.cwd,
            "collect": list(launch.collect),
            "environment": without_secrets(launch.environment),
            "commands": [
                {
                    "rank": command.rank,
                    "host": command.host,
                    "slots": list(command.all_slots),
                    "argv": redact_words(command.argv),
                    "environment": without_secrets(command.environment),
                }
                for command in launch.commands
            ],
        }
        self._write(_LAUNCH, _json(record))
        for name, data in launch.files.items():
            path = self.path / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, [redact_data(data, launch.secrets, is_log=False)], mode=_MODE)

    def write_rerun(self, launch: Launch, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Write ``rerun.sh``: the started commands, with a variable for the removed folder."""
        lines = [_RERUN_HEAD.format(trial_id=launch.trial_id)]
        for command, rank in zip(launch.commands, ranks, strict=True):
            environment = {**rank["environment"], FOLDER_VARIABLE: FOLDER}
            numbers = count(1)
            where = _word(FOLDER if launch.cwd is None else launch.cwd, numbers)
            variables = [_variable(*variable, numbers) for variable in sorted(environment.items())]
            arguments = [_word(word, numbers) for word in redact_words(rank["argv"])]
            words = " ".join(["env", *variables, *arguments])
            slots, first = command.all_slots, command.rank
            several = len(slots) > 1
            who = f"ranks {first} to {first + len(slots) - 1}" if several else f"rank {first}"
            shown = f"{'slots' if several else 'slot'} {', '.join(map(str, slots))}"
            lines.append(f"# {who} on {printable(command.host)}, {shown}")
            lines.append(f"cd {where} && {words}\n")
        self._write("rerun.sh", "\n".join(lines))

    def write_events(
        self, events: Sequence[Mapping[str, Any]], secrets: Collection[str] = ()
    ) -> None:
        """Append the agents' messages of one attempt, without known secrets."""
        with open(self.path / "events.jsonl", "a", encoding="utf-8", opener=private) as file:
            redacted = (redact_values(event, secrets) for event in events)
            file.writelines(json.dumps(event) + "\n" for event in redacted)

    def make_files(self, launch: Launch) -> dict[str, HostFiles]:
        """Make a folder per host for collected files; a retry replaces earlier files."""
        folder = self.path / _HOSTS
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=_FOLDER_MODE)
        self._host_files = {
            host: HostFiles(
                folder / _folder_name(host),
                launch.collect,
                [command.rank for command in launch.commands if command.host == host],
            )
            for host in launch.hosts
        }
        return self._host_files

    def redact_files(self, secrets: Collection[str]) -> None:
        """Replace secrets in collected files; call it after they were read."""
        for files in self._host_files.values():
            files.redact(secrets)

    def write_outcome(self, outcome: Outcome) -> None:
        """Write ``outcome.json``, the last file of the folder."""
        self._write("outcome.json", _json(outcome_to_json(outcome)))

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, [text.encode()], mode=_MODE)


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def timeline_file(folder: Path) -> Path | None:
    """Return the path of the timeline collected from rank 0's host; None if there is none."""
    try:
        launch = json.loads(read_text(folder / _LAUNCH))
        host = launch["commands"][0]["host"]
        file = folder / _HOSTS / _folder_name(host) / TIMELINE_FILE
        return file if file.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _variable(name: str, text: str, numbers: Iterator[int]) -> str:
    if is_secret(name):
        return f'{name}="${{{name}:?set it before: its value was not kept}}"'
    return _word(f"{name}={redact(text)}", numbers)


def _folder_name(host: str) -> str:
    """Return a safe folder name for a host, unique per host."""
    name = urllib.parse.quote(host, safe="@:[]")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def _word(text: str, numbers: Iterator[int]) -> str:
    """Quote a word for a shell; the trial's folder and secrets become variables.

    Each secret gets a new variable, with the next number.
    """
    first, *parts = map(_plain_word, text.split(NOT_KEPT))
    ask = "set it before: its value was not kept"
    word = first + "".join(f'"${{SECRET_{next(numbers)}:?{ask}}}"{part}' for part in parts)
    return word or "''"


def _plain_word(text: str) -> str:
    return '"$FOLDER"'.join(shlex.quote(part) if part else "" for part in text.split(FOLDER))
