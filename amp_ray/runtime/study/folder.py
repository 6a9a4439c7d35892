"""The folder of a study: made once, locked by its driver, and everything in it by name."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amp_ray.calibration.fingerprint import describe_differences
from amp_ray.errors import AmpRayError, InputError, Where
from amp_ray.owners import why_untrusted
from amp_ray.runtime.files import write_text
from amp_ray.runtime.study.events import read_header
from amp_ray.runtime.study.journal import Body, Journal, sync_folder
from amp_ray.runtime.study.lock import LOCK, StudyLock
from amp_ray.runtime.whole_file import PARTIAL

JOURNAL: Final = "journal.jsonl"
TRIALS: Final = "trials"
# Begins a line above the copy of the experiment file: a key that was set, as a JSON string
CHANGE: Final = "# --set "
PROGRAM: Final = "program"  # of a header: what trials run; may change until something is measured
# What would lead a file's name elsewhere, or be taken for an option
_NO_FILE_NAME: Final = re.compile(r"[/\\\0-\x1f\x7f]+|^[.~-]+")
_ID_BYTES: Final = 4  # of a study's name: two studies that meet on one host differ in it
_MODE: Final = 0o700  # of a study's folder: logs and commands of trials are their owner's
_MAX_NAMED: Final = 3  # files that a message names


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
    """

    folder: Path
    journal: Journal  # open; its first record is the header
    study_id: str
    is_new: bool
    broken: str | None  # the driver whose lock was left behind, for people; None if there was none

    @property
    def trials_folder(self) -> Path:
        """Where the folders of attempts are."""
        return self.folder / TRIALS

    def write(self, name: str, text: str | Iterable[str]) -> None:
        """Write one of its files, whole or not at all; a long one may come in pieces."""
        try:
            write_text(self.folder / name, text, mode=0o600)
        except InputError as error:  # nobody has named that file
            raise AmpRayError(
                f"{error}. The journal has everything: mend that, and --resume writes it again"
            ) from error


@contextlib.contextmanager
def open_study(
    folder: Path, header: Mapping[str, Any], *, resume: bool, salvage: bool = False
) -> Iterator[Study]:
    """Make or go on with a study's folder, locked until the end; ``salvage`` mends its journal."""
    header = json.loads(json.dumps(header))  # as it will be read
    if not check_folder(folder, resume=resume):
        _make(folder)
    with StudyLock(folder) as lock:
        journal = Journal.open(folder / JOURNAL, salvage=salvage and resume)
        try:
            for partial in folder.glob(PARTIAL):  # of a driver that was killed
                partial.unlink(missing_ok=True)
            is_new = not journal.records
            if is_new:
                study_id = os.urandom(_ID_BYTES).hex()
                journal.append({**header, "study": study_id})
            else:
                first = read_header(journal.records, file=str(folder / JOURNAL))
                study_id = first.study
                _check_is_expected(folder, journal.records[0], header, resume=resume)
            _make(folder / TRIALS)
            yield Study(
                folder=folder,
                journal=journal,
                study_id=study_id,
                is_new=is_new,
                broken=lock.broken,
            )
        finally:
            journal.close()


def folder_for(name: str) -> Path:
    """Return the folder of an experiment's study where none is named: below the current one."""
    plain = _NO_FILE_NAME.sub("_", name)
    return Path(f"{plain}-study")


def check_folder(folder: Path, *, resume: bool) -> bool:
    """Tell whether a folder is a study's; refuse one that can be none. Nothing is changed."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise InputError(f"{folder}: a study cannot be kept here: {error.strerror}") from error
    _check_owner(folder)
    check_links(folder)
    is_study = bool({JOURNAL, LOCK} & set(names))
    if resume and not is_study:
        raise InputError(
            f"{folder} has no study to go on with: leave --resume out to begin one (a driver that "
            "ended before its first trial may have left none), or name a study's folder by --study"
        )
    others = [name for name in names if not name.startswith(".")]
    if others and not is_study:
        named = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
        message = f"{folder} has files of something else ({named}): name a new folder by --study"
        raise InputError(message)
    return is_study


def _check_owner(folder: Path) -> None:
    """Refuse a folder that others could change: its driver would follow their orders."""
    if (reason := why_untrusted(folder)) is not None:
        raise InputError(
            f"{folder}: a study cannot be kept where others could change it: {reason}, or name a "
            "folder by --study that only you can change"
        )


def check_links(folder: Path) -> None:
    """Refuse a study with a link that leads out of its folder: files would be read there."""
    inside = os.path.realpath(folder)
    for path in _links(folder):
        target = os.path.realpath(path)
        if os.path.commonpath([inside, target]) != inside:
            message = f"a link out of the study's folder, to {target}: remove it, or name another"
            raise InputError(f"{message} study", where=Where(file=str(path)))


def _links(folder: str | Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir():
                yield from _links(entry.path)


def _make(folder: Path) -> None:
    """Make a folder, so that it survives a crash of the machine."""
    try:
        folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        _check_owner(folder)  # somebody else may have made it meanwhile
        with contextlib.suppress(PermissionError):  # a file system without modes
            folder.chmod(_MODE)
        sync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: a study cannot be kept here: {error.strerror}") from error


def _check_is_expected(
    folder: Path, found: Body, header: Mapping[str, Any], *, resume: bool
) -> None:
    """Refuse to begin a study anew, or to go on with one of something else."""
    where = Where(file=str(folder / JOURNAL), line=1)
    if not resume:
        raise InputError(
            f"{folder} has a study: go on with it by --resume, or name another folder by --study"
        )
    told = [
        _difference(key, found.get(key), header[key])
        for key in header
        if key != PROGRAM and found.get(key) != header[key]
    ]
    if told:
        message = (
            f"the study is one of experiment {found.get('experiment')!r} with other givens "
            f"({'; '.join(told)}): its trials say nothing about this one. Name another folder by "
            "--study"
        )
        raise InputError(message, where=where)


def _difference(key: str, found: object, expected: object) -> str:
    """Tell what differs; of fingerprints, which figures."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        differences = describe_differences(found, expected)
        return differences.replace("in the calibration", "in the study") or f"{key} differs"
    return f"{key} is {found!r} in the study, {expected!r} here"
