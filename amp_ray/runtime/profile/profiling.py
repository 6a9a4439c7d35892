"""``amp-ray profile``: measures missing points on hosts in parallel, and stores each at once."""

import datetime as dt
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.runtime.files import not_linked, read_text, write_text
from amp_ray.runtime.hosts.host import MakeHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.program_files import source_files
from amp_ray.runtime.profile.parts import Part
from amp_ray.trials.outcome import Measured, Outcome, OutOfMemory
from amp_ray.trials.profile.launch import profile_job, profile_launch, read_end
from amp_ray.trials.profile.points import LayerPoint, LinkPoint
from amp_ray.trials.profile.records import (
    POINT_KEYS,
    ProfileRecords,
    Record,
    heading,
    parse_records,
    record_of_event,
)
from amp_ray.trials.profile.tables import RECORDS_FILE, profile_files

_MAX_LAUNCHES: Final = 12
"""Limit per part; a part is launched again after the kernel has killed a rank for its memory."""

Say = Callable[[str], None]  # gets a line about progress, on any thread


class ProfileFolder:
    """The folder of a profile: records are appended at once, the other files written at the end.

    ============================  ====================================================
    ``profile.yaml``              model, precision, hardware, versions, date
    ``DEVICE.csv``                layer times of one device, for plans
    ``DEVICE.tpN.slices.json``    times of token slices, for plans
    ``details/records.jsonl``     every measurement, in order
    ``details/*.csv``             all measurements of layers, memory and links
    ``details/runs/``             a folder per launch, like that of a trial
    ============================  ====================================================
    """

    def __init__(self, path: Path, model: Model, precision: str) -> None:
        """Open or create a folder, and read the records of earlier runs.

        Raises:
            InputError: If the folder has a profile of another model or precision, or is unusable.
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
            # An earlier run was killed within a line: cut off that line
            write_text(self._file, whole)
        if not whole:
            self.add(first)

    def add(self, record: Record) -> None:
        """Append a record; safe from any thread."""
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
        """Return a new path for the folder of the next launch, without creating it."""
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
        """Write the files of the profile, and ``more`` in the same folder, each atomically.

        Returns:
            The names of the written files.
        """
        files = profile_files(self.records, self._model, self._precision) | dict(more or {})
        for name, text in files.items():
            write_text(self.path / name, text)
        return tuple(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Time limits and interpreter of a profile run."""

    seconds: float  # time limit per device type; the next run measures the rest
    make_host: MakeHost
    say: Say
    # Interpreter for the measurements; None for the interpreter of the hosts' agents
    python: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """The result of one part."""

    part: Part
    num_missing: int
    missing: tuple[str, ...] = ()
    # Smallest micro-batch size that does not fit, by tp
    too_large: Mapping[int, int] = field(default_factory=dict)
    problem: str | None = None  # why the part stopped early; None if it did not
    wall_s: float = 0.0  # wall time of this run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    links: tuple[LinkPoint, ...]
    layers: tuple[LayerPoint, ...]
    step: bool

    @property
    def num(self) -> int:
        return len(self.links) + len(self.layers) + self.step

    @property
    def words(self) -> tuple[str, ...]:
        layers = Counter(
            ("slices" if point.tokens else "layers", point.tp, point.micro_batch_size)
            for point in self.layers
        )
        return (
            *([f"{len(self.links)} messages"] if self.links else ()),
            *(["what surrounds the layers"] if self.step else ()),
            *(
                f"{count} {what} at tp {tp} micro-batch size {size}"
                for (what, tp, size), count in layers.items()
            ),
        )


def measure(
    experiment: Experiment, parts: Sequence[Part], folder: ProfileFolder, settings: Settings
) -> tuple[PartReport, ...]:
    """Measure missing points: device types in parallel, then links between hosts one by one.

    Points with a record in ``folder`` are not measured again.
    """
    run = _Run(experiment, folder, settings)
    within = [part for part in parts if part.place.scope == "intra"]
    between = [part for part in parts if part.place.scope != "intra"]
    with ThreadPoolExecutor(max_workers=max(1, len(within))) as pool:
        reports = list(pool.map(run.part, within))
    return (*reports, *map(run.part, between))


class _Run:
    def __init__(self, experiment: Experiment, folder: ProfileFolder, settings: Settings) -> None:
        """Read the measuring program's source files, which every launch sends."""
        self._experiment, self._folder, self._settings = experiment, folder, settings
        self._program = source_files()

    def part(self, part: Part) -> PartReport:
        """Measure a part until no point is missing, the time is over or a launch fails."""
        begin = time.monotonic()
        end = begin + self._settings.seconds
        problem: str | None = None
        begun: dict[str, Any] = {}
        for _ in range(_MAX_LAUNCHES):
            work = self._missing(part)
            seconds = end - time.monotonic()
            if not work.num or seconds <= 0:
                break
            begun.clear()
            outcome = self._launch(part, work, seconds, begun)
            if isinstance(outcome, OutOfMemory) and begun:
                # The kernel killed a rank: the last point is too large; measure the others
                self._folder.add({**begun, "record": "oom", "devices": part.place.devices})
                continue
            problem = None if isinstance(outcome, Measured) else outcome.reason
            break
        limits, missing = self._folder.records.limits, self._missing(part)
        return PartReport(
            part=part,
            num_missing=missing.num,
            missing=missing.words,
            too_large={
                tp: size for (device, tp), size in limits.items() if device == part.place.devices
            },
            problem=problem,
            wall_s=time.monotonic() - begin,
        )

    def _missing(self, part: Part) -> _Work:
        records, devices = self._folder.records, part.place.devices
        return _Work(
            links=records.missing_links(part.place, part.links),
            layers=records.missing_layers(devices, part.layers),
            step=part.step and devices not in records.steps,
        )

    def _launch(
        self,
        part: Part,
        work: _Work,
        seconds: float,
        begun: dict[str, Any],
    ) -> Outcome:
        """Launch the program once; store the last begun point in ``begun``."""
        say, date = self._settings.say, dt.datetime.now(tz=dt.UTC).date().isoformat()
        say(f"{part.name}: {len(work.links)} messages and {len(work.layers)} layers to measure")

        def hear(event: Mapping[str, Any]) -> None:
            record = record_of_event(event, place=part.place, date=date)
            if record is not None:
                self._folder.add(record)
            if event.get("event") == "begin":
                place = {key: event[key] for key in POINT_KEYS if event.get(key) is not None}
                begun.update(place)
                say(f"{part.name}: " + ", ".join(f"{key} {place[key]}" for key in place))

        hosts = [self._settings.make_host(node.name) for node in part.nodes]
        run_folder = self._folder.new_run(part.name)
        trial = profile_job(
            trial_id=f"profile-{run_folder.name}",
            model=self._experiment.model,
            precision=self._experiment.precision,
            device=part.nodes[0].device.name,
            num_ranks=len(part.places),
            optimizer=self._experiment.optimizer,
        )
        launch = profile_launch(
            trial,
            part.places,
            work=(work.links, work.layers),
            step=work.step,
            seconds=seconds,
            program=(self._settings.python or hosts[0].python, self._program),
        )
        with Launcher(hosts, listener=hear) as launcher:
            return launcher.run(launch, run_folder, reader=read_end)
