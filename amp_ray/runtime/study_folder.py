"""The folder of a study: made once, locked by its driver, and everything in it by name."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import InputError, Where
from amp_ray.runtime.files import write_text
from amp_ray.runtime.journal import Body, Journal, read_journal
from amp_ray.runtime.study_lock import StudyLock

JOURNAL: Final = "journal.jsonl"
TRIALS: Final = "trials"

_ID_LENGTH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """A study's folder, open and locked for this driver.

    ==================  =======================================================
    ``journal.jsonl``   what happened, event by event; everything else can be rebuilt from it
    ``lock``            who drives it
    ``experiment.yaml`` a copy of the experiment file
    ``trials/NNNN-A/``  trial NNNN, attempt A: commands, logs, what came back
    ``history.csv``     all trials as a table; ``history.jsonl`` the same as the contract's objects
    ``measured.csv``    strategies and times, for ``calibrate`` and ``tune --trials replay:``
    ``result.json``     the last result
    ``calibration.json``  the last calibration, for ``plan --calibration``
    ==================  =======================================================

    Args:
        folder: Where it is.
        journal: Open; its first record is the header.
        study_id: Short, and different for every study.
        is_new: Whether nothing has happened in it yet.
    """

    folder: Path
    journal: Journal
    study_id: str
    is_new: bool

    @property
    def trials_folder(self) -> Path:
        """Where the folders of attempts are."""
        return self.folder / TRIALS

    def write(self, name: str, text: str) -> None:
        """Write one of its files, whole or not at all."""
        write_text(self.folder / name, text)


@contextlib.contextmanager
def open_study(folder: Path, header: Mapping[str, Any], *, resume: bool) -> Iterator[Study]:
    """Make a study's folder, or go on with one; locked until the end.

    Args:
        folder: Where.
        header: What has to be the same when the study goes on.
        resume: Whether there is a study to go on with.

    Raises:
        InputError: If there is a study and ``resume`` is false, or the other way round, or it is
            one of something else, or another driver is at work on it.
        AmpRayError: If the folder cannot be written.
    """
    header = json.loads(json.dumps(header))  # as it will be read
    _check_presence(folder, resume=resume)
    try:
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{folder}: a study cannot be kept here: {error.strerror}"
        raise InputError(message) from error
    with StudyLock(folder):
        # Somebody else may have made it in the meantime.
        _check_presence(folder, resume=resume)
        journal = Journal.open(folder / JOURNAL)
        try:
            is_new = not journal.records
            if is_new:
                journal.append({**header, "study": os.urandom(_ID_LENGTH).hex()[:_ID_LENGTH]})
                found: Body = read_journal(folder / JOURNAL).bodies[0]
            else:
                found = journal.records[0]
                _check_header(folder, found, header)
            yield Study(folder=folder, journal=journal, study_id=found["study"], is_new=is_new)
        finally:
            journal.close()


def _check_presence(folder: Path, *, resume: bool) -> None:
    """Refuse to overwrite a study, and to go on with none."""
    path = folder / JOURNAL
    try:
        exists = path.exists() and path.stat().st_size > 0
    except OSError as error:
        message = f"{folder}: cannot be read: {error.strerror}"
        raise InputError(message) from error
    if exists and not resume and read_journal(path).bodies:
        message = (
            f"{folder} has a study: go on with it by --resume, or name another folder by --study"
        )
        raise InputError(message)
    if not exists and resume and not folder.is_dir():
        message = f"{folder} has no study to go on with; leave --resume out to begin one"
        raise InputError(message)


def _check_header(folder: Path, found: Body, header: Mapping[str, Any]) -> None:
    """Refuse to go on with a study of something else."""
    differing = [key for key in header if found.get(key) != header[key]]
    if not differing:
        return
    told = []
    for key in differing:
        if isinstance(header[key], Mapping) and isinstance(found.get(key), Mapping):
            parts = [part for part in header[key] if found[key].get(part) != header[key][part]]
            told.append(f"{key}: {', '.join(parts)}")
        else:
            told.append(f"{key}: {found.get(key)!r} there, {header[key]!r} here")
    message = (
        f"the study is one of experiment {found.get('experiment')!r} with other givens "
        f"({'; '.join(told)}): its trials say nothing about this one. Name another folder by "
        "--study"
    )
    raise InputError(message, where=Where(file=str(folder / JOURNAL), line=1))
