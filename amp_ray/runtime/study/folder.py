"""The folder of a study: its creation, checks, lock and file names."""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amp_ray.calibration.fingerprint import describe_differences
from amp_ray.errors import AmpRayError, InputError, Where
from amp_ray.owners import why_untrusted
from amp_ray.runtime.files import private, write_text
from amp_ray.runtime.study.events import now, read_header
from amp_ray.runtime.study.journal import Body, Journal, sync_folder
from amp_ray.runtime.whole_file import PARTIAL

JOURNAL: Final = "journal.jsonl"
LOCK: Final = "lock"
TRIALS: Final = "trials"
# Prefix of comment lines in the copy of the experiment file: the text of one --set as JSON
CHANGE: Final = "# --set "
PROGRAM: Final = "program"  # header key of the program; it may change until a trial is measured
# Path separators, control characters, and prefixes with a special meaning to shells
_NO_FILE_NAME: Final = re.compile(r"[/\\\0-\x1f\x7f]+|^[.~-]+")
_ID_BYTES: Final = 4  # size of the random study id, which tells two studies on one host apart
_MODE: Final = 0o700  # permissions of a study's folder: only its owner may read logs and commands
_MAX_NAMED: Final = 3  # maximum number of files that an error message lists

# A driver writes its name into the lock file shortly after it takes the lock. Until then the file
# may be empty or name the previous driver
_NUM_LOOKS: Final = 50
_PAUSE_S: Final = 0.02
_MOST_BYTES: Final = 4096  # maximum size of the lock file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """A study's folder, open and locked for this driver.

    ==================  =======================================================
    ``journal.jsonl``   all events; the result files below can be rebuilt from it
    ``lock``            host and process id of the driver
    ``experiment.yaml`` a copy of the experiment file
    ``trials/NNNN-A/``  trial NNNN, attempt A: commands, logs, fetched files
    ``history.csv``     all trials as a table; ``history.jsonl`` has one JSON object per trial
    ``measured.csv``    strategies and times, for ``calibrate`` and ``tune --trials replay:``
    ``result.json``     the last result
    ``calibration.json``  the last calibration, for ``plan --calibration``
    ==================  =======================================================
    """

    folder: Path
    journal: Journal  # open; its first record is the header
    study_id: str
    is_new: bool
    broken: str | None  # description of a previous driver that died; None if there was none

    @property
    def trials_folder(self) -> Path:
        """The parent of the attempts' folders."""
        return self.folder / TRIALS

    def write(self, name: str, text: str | Iterable[str]) -> None:
        """Write a file of the study atomically; ``text`` may be an iterable of pieces."""
        try:
            write_text(self.folder / name, text, mode=0o600)
        except InputError as error:  # an error of the environment: the user did not name the file
            raise AmpRayError(
                f"{error}. The journal has everything: mend that, and --resume writes it again"
            ) from error


@contextlib.contextmanager
def open_study(
    folder: Path, header: Mapping[str, Any], *, resume: bool, salvage: bool = False
) -> Iterator[Study]:
    """Create or resume a study and hold its lock; ``salvage`` accepts a damaged journal."""
    header = json.loads(json.dumps(header))  # tuples become lists, as in the journal
    if not check_folder(folder, resume=resume):
        _make(folder)
    with locked(folder) as died:
        journal = Journal.open(folder / JOURNAL, salvage=salvage and resume)
        try:
            for partial in folder.glob(PARTIAL):  # temporary files of a driver that was killed
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
                broken=died,
            )
        finally:
            journal.close()


def folder_for(name: str) -> Path:
    """Return the default folder of an experiment's study, in the current directory."""
    plain = _NO_FILE_NAME.sub("_", name)
    return Path(f"{plain}-study")


def check_folder(folder: Path, *, resume: bool) -> bool:
    """Return whether a folder has a study; refuse an unsafe one, or one with other files."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise InputError(f"{folder}: a study cannot be kept here: {error.strerror}") from error
    _check_owner(folder)
    check_contents(folder)
    is_study = bool({JOURNAL, LOCK} & set(names))
    if resume and not is_study:
        raise InputError(
            f"{folder} has no study to go on with: leave --resume out to begin one (a driver that "
            "ended before its first trial may have left none), or name a study's folder by --study"
        )
    strangers = [name for name in names if not name.startswith(".")]
    if strangers and not is_study:
        named = ", ".join(strangers[:_MAX_NAMED]) + (", ..." if len(strangers) > _MAX_NAMED else "")
        message = f"{folder} has files of something else ({named}): name a new folder by --study"
        raise InputError(message)
    return is_study


def _check_owner(folder: Path) -> None:
    """Refuse a folder that other users can write to, since they could make us run commands."""
    if (reason := why_untrusted(folder)) is not None:
        raise InputError(
            f"{folder}: a study cannot be kept where others could change it: {reason}, or name a "
            "folder by --study that only you can change"
        )


def check_contents(folder: Path) -> None:
    """Refuse a study with a pipe, device or socket, or with a link out of its folder."""
    inside = os.path.realpath(folder)
    for entry in _no_files(folder):
        problem = "neither a file nor a folder"
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath([inside, target]) == inside:
                continue
            problem = f"a link out of the study's folder, to {target}"
        raise InputError(
            f"{problem}: remove it, or name another study", where=Where(file=entry.path)
        )


def _no_files(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries, at any depth, that are neither a file nor a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _no_files(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                yield entry


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        _check_owner(folder)  # another user may have made it in the meantime
        with contextlib.suppress(PermissionError):  # some file systems have no modes
            folder.chmod(_MODE)
        sync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: a study cannot be kept here: {error.strerror}") from error


def _check_is_expected(
    folder: Path, kept: Body, header: Mapping[str, Any], *, resume: bool
) -> None:
    """Refuse to begin a study over an existing one, or to resume one of another experiment."""
    where = Where(file=str(folder / JOURNAL), line=1)
    if not resume:
        raise InputError(
            f"{folder} has a study: go on with it by --resume, or name another folder by --study"
        )
    differences = [
        _difference(key, kept.get(key), header[key])
        for key in header
        if key != PROGRAM and kept.get(key) != header[key]
    ]
    if differences:
        message = (
            f"the study is one of experiment {kept.get('experiment')!r} with other givens "
            f"({'; '.join(differences)}): its trials say nothing about this one. Name another "
            "folder by --study"
        )
        raise InputError(message, where=where)


def _difference(key: str, kept: object, expected: object) -> str:
    """Describe how a key of the header differs; list the differing values of fingerprints."""
    if isinstance(kept, Mapping) and isinstance(expected, Mapping):
        differences = describe_differences(kept, expected)
        return differences.replace("in the calibration", "in the study") or f"{key} differs"
    return f"{key} is {kept!r} in the study, {expected!r} here"


# ------------------------------------------------------------------------------------ the lock


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Lock a study's folder; yield a description of a previous driver that died, or None.

    The lock is the kernel's ``flock`` on the open file: it ends with the process, so it is never
    stale. On a folder that several machines share, ``flock`` may work per machine only, so the file
    also names the holder, and a driver on another machine is refused. If a driver was killed, users
    of another machine have to remove its lock file by hand. This program never deletes the file,
    because another driver may have it open and wait for it.
    """
    path = folder / LOCK
    descriptor = _lock(path)
    try:
        died = _take_over(path, descriptor)
        try:
            yield died
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Open the lock file and take the kernel's lock; return the descriptor."""
    holder: dict[str, Any] = {}
    for _look in range(_NUM_LOOKS):
        try:
            descriptor = private(str(path), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            holder = _read(descriptor)
        except FileNotFoundError:
            pass  # removed by hand since it was opened: try again with a new file
        except OSError as error:
            os.close(descriptor)
            message = f"{path}: cannot be locked ({error.strerror})"
            raise AmpRayError(f"{message}: keep studies on a file system with locks") from error
        os.close(descriptor)
        time.sleep(_PAUSE_S)
    raise InputError(f"{path.parent} is being driven by {_describe(holder)}")


def _take_over(path: Path, descriptor: int) -> str | None:
    """Write this driver's name into the lock file; describe the driver that died with the lock.

    Returns None if no driver died.
    """
    before, here = _read(descriptor), _here()
    same_machine = all(before.get(key) == here[key] for key in ("host", "machine"))
    if before and not same_machine and before.get("boot") != here["boot"]:
        raise InputError(
            f"{path.parent} is being driven by {_describe(before)}, or was until that ended "
            f"without a trace; if you are sure that it has, remove {path}"
        )
    holder = {**here, "pid": os.getpid(), "since": now()}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
    except OSError as error:
        raise _unusable(path, error) from error
    return _describe(before) if before else None


def _unusable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot be written: {error.strerror}", where=Where(file=str(path)))


def _read(descriptor: int) -> dict[str, Any]:
    """Return the holder that the lock file names; empty if the file is empty or incomplete."""
    with contextlib.suppress(ValueError, OSError):
        holder = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another driver"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def _here() -> dict[str, str]:
    """Return identifiers of this machine and of its current boot.

    Containers on one machine differ in host name, but share the kernel and its boot id, so the
    kernel's lock works between them.
    """
    return {
        "host": os.uname().nodename,
        "machine": _line("/etc/machine-id"),
        "boot": _line("/proc/sys/kernel/random/boot_id"),
    }


def _line(path: str) -> str:
    """Return the content of a small system file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
