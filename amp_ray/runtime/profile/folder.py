"""The folder that a profile is written to, and that the next run goes on from."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from amp_ray.errors import InputError, Where
from amp_ray.models.model import Model
from amp_ray.runtime.files import not_linked, read_text, write_text
from amp_ray.trials.profile.records import ProfileRecords, Record, heading, parse_records
from amp_ray.trials.profile.tables import RECORDS_FILE, profile_files


class ProfileFolder:
    """Records are appended as they come; the files of the profile are written at the end.

    ============================  ====================================================
    ``profile.yaml``              what was measured
    ``DEVICE.csv``                layer times of one device, as plans read them
    ``DEVICE.tpN.slices.json``    times of token slices, likewise
    ``details/records.jsonl``     every measurement as it came
    ``details/*.csv``             layers, memory and links with everything measured
    ``details/runs/``             a folder per launch, like that of a trial
    ============================  ====================================================
    """

    def __init__(self, path: Path, model: Model, precision: str) -> None:
        """Open a folder, or make it, and read what earlier runs have measured.

        Raises:
            InputError: If it holds a profile of something else, or cannot be used.
        """
        self.path = path
        self._model, self._precision = model, precision
        self._lock = threading.Lock()
        self._file = path / RECORDS_FILE
        first = heading(model, precision)
        if not self._file.exists() and any(path.glob("*.csv")):
            message = "holds tables that were not measured by this command; name another folder"
            raise InputError(message, where=Where(file=str(path)))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot be made: {error.strerror}"
            raise InputError(message, where=Where(file=str(path))) from error
        text = read_text(self._file) if self._file.exists() else ""
        self.records: ProfileRecords = parse_records(text, file=str(self._file), expected=first)
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            # A run was cut off in the middle of a line, which would spoil the next one.
            write_text(self._file, whole)
        if not whole:
            self.add(first)

    def add(self, record: Record) -> None:
        """Append a record; any thread may."""
        line = json.dumps(record) + "\n"
        with self._lock:
            try:
                with open(self._file, "a", encoding="utf-8", opener=not_linked) as file:
                    file.write(line)
            except OSError as error:
                message = f"cannot be written: {error.strerror}"
                raise InputError(message, where=Where(file=str(self._file))) from error
            self.records.add(record)

    def new_run(self, name: str) -> Path:
        """Return the path of a folder for the next launch, which does not exist yet."""
        runs = self.path / "details" / "runs"
        with self._lock:
            runs.mkdir(exist_ok=True)
            number = len(list(runs.iterdir()))
            while True:
                path = runs / f"{number:03d}-{name}"
                if not path.exists():
                    return path
                number += 1

    def write(self, more: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Write the files of the profile, and more beside them, each whole or not at all.

        Returns:
            Their names.
        """
        files = profile_files(self.records, self._model, self._precision) | dict(more or {})
        for name, text in files.items():
            write_text(self.path / name, text)
        return tuple(files)
