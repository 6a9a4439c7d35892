"""Read a study's result and experiment or, while it runs, its journal."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from amp_ray.errors import AmpRayError, InputError, Where, placed
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.section import Flag, Index, Section, validate
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.inputs.strict_text import parse_json
from amp_ray.inputs.yaml_text import Document, parse_yaml, with_changes
from amp_ray.redaction import redact_values
from amp_ray.runtime.files import (
    ExperimentFiles,
    not_linked,
    read_text,
    with_calibration,
)
from amp_ray.runtime.launch.trial_folder import timeline_file
from amp_ray.runtime.own_inputs import remember_input
from amp_ray.runtime.study.events import JournalTrial, Started, Stopped, read_header, replay_journal
from amp_ray.runtime.study.folder import CHANGE, JOURNAL, TRIALS, check_contents
from amp_ray.runtime.study.journal import parse
from amp_ray.runtime.study.result import ENDINGS
from amp_ray.search.rows import SCHEMA
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import (
    NO_OUTCOME,
    no_success_text,
    outcome_to_json,
    trial_tells_time,
)
from amp_ray.trials.timeline import RankTimeline, read_timeline

_LOGGER = logging.getLogger(__name__)
_RESULT = "result.json"
_EXPERIMENT = "experiment.yaml"
_CALIBRATION = "calibration.json"


class _Known(Section):
    """A part of ``result.json``; only the keys that this package reads are declared."""

    model_config = ConfigDict(extra="allow", frozen=True)


class _Recompute(_Known):
    kind: str
    layers: int


class _Strategy(_Known):
    tp: int | None
    pp: int | None
    dp: int | None
    micro_batch_size: int
    bounds: list[int] | None = None
    stages: list[dict[str, Any]] | None = None
    recompute: str | _Recompute | list[str | _Recompute] | None = None


class _Planned(_Known):
    strategy: _Strategy


class _Row(_Planned):
    feasible: Flag


class _Trial(_Planned):
    number: Index
    outcome: str | None = None
    reason: str | None = None
    host: str | None = None
    remarks: tuple[str, ...] = ()


class _Tie(_Planned):
    time_s: float
    measured: Flag


class _Recommended(_Planned):
    predicted_s: float
    measured_s: float | None
    reason: str
    ties: list[_Tie]
    rests_on: Literal["measured", "posterior", "predicted"] | None = None
    time_s: float | None = None
    interval_s: tuple[float, float] | None = None


class _Certificate(_Known):
    text: str


class _Fitted(_Planned):
    measured_s: float | None  # None if the trial failed
    before_s: float
    after_s: float


class _Constant(_Known):
    name: str
    prior: float
    value: float
    sigma: float


class _Calibration(_Known):
    trials: list[_Fitted]
    constants: list[_Constant]


class _Result(_Known):
    experiment_file: str | None = None
    ending_text: str
    trials: list[_Trial]
    ranking: list[_Row]
    recommendation: _Recommended | None = None
    certificate: _Certificate | None = None
    calibration: _Calibration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStudy:
    """A finished or stopped study, opened for reading only."""

    folder: Path
    experiment: Experiment
    result: dict[str, Any]  # the object of ``tune --json``

    @property
    def recommendation(self) -> dict[str, Any] | None:
        """The recommended strategy; ``rests_on`` is filled in for studies of older versions.

        They also recommended a strategy where nothing was measured; that is None now.
        """
        record = self.result.get("recommendation") if self.has_measured else None
        if record is None or "rests_on" in record:
            return record
        measured_s, predicted_s = record["measured_s"], record["predicted_s"]
        rests_on = "predicted" if measured_s is None else "measured"
        return {**record, "rests_on": rests_on, "time_s": measured_s or predicted_s}

    @property
    def has_measured(self) -> bool:
        """Whether a trial was measured."""
        return any(trial.get("outcome") == "measured" for trial in self.result["trials"])

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """The rows of the ranking, with the recommended strategy moved to the first place."""
        recommended, rows = self.recommendation, self.result["ranking"]
        if recommended is not None:
            rows = sorted(rows, key=lambda row: row["strategy"] != recommended["strategy"])
        return [{**row, "position": position} for position, row in enumerate(rows, start=1)]

    def strategy(self, position: int | None) -> tuple[Strategy, float | None]:
        """Return a strategy and its time: the one at a position, by default the recommended one.

        Raises:
            AmpRayError: If none is named, and nothing was measured.
            InputError: If fewer strategies can run.
        """
        where = Where(file=str(self.folder / _RESULT))
        if position is None and not self.has_measured:
            failed = no_success_text(self.result["trials"]) or "No trial has ended"
            message = "so the study recommends no strategy; --position 1 takes the best predicted"
            raise AmpRayError(f"{self.folder}: {failed}: {message}")
        rows = [row for row in self.ranking if row["feasible"]]
        chosen = self.recommendation if position is None else None
        if chosen is None:
            if (position or 1) > len(rows):
                message = f"--position {position or 1}: {len(rows)} strategies of it can run"
                raise InputError(message, where=where)
            chosen = rows[(position or 1) - 1]
        record = chosen["strategy"]
        strategy = strategy_from_json(record, self.experiment.cluster, file=where.file)
        return strategy, chosen.get("predicted_s", chosen.get("iteration_time_s"))

    def calibrated(self) -> Experiment:
        """Return the experiment, with the study's calibration if the study has one."""
        path = self.folder / _CALIBRATION
        return (
            with_calibration(self.experiment, path, transfer=True)
            if path.is_file()
            else self.experiment
        )

    def timeline(self, strategy: Strategy) -> tuple[RankTimeline, ...]:
        """Return the timelines of the last trial of a strategy that has any; empty if none has."""
        cluster = self.experiment.cluster
        for trial in reversed(self.result["trials"]):
            if strategy_from_json(trial["strategy"], cluster) != strategy:
                continue
            attempts = sorted((self.folder / TRIALS).glob(f"{trial['number']:04d}-*"))
            for file in filter(None, map(timeline_file, reversed(attempts))):
                try:
                    return read_timeline(file.read_bytes(), num_ranks=cluster.num_devices)
                except (OSError, ValueError) as error:
                    _LOGGER.warning("%s is left out: %s", file, error)
        return ()


def read_study(folder: Path, changes: tuple[str, ...] = ()) -> ReadStudy:
    """Read result and experiment of a study; paths are relative to the original experiment file."""
    if not (folder / _RESULT).is_file():
        message = "no study with a result: name an experiment file, or the folder that tune made"
        raise InputError(message, where=Where(file=str(folder)))
    check_contents(folder)
    file = folder / _RESULT
    result = parse_json(read_text(file), file=str(file))
    validate(_Result, Document(file=str(file), values=result))
    copy = folder / _EXPERIMENT
    origin = result.get("experiment_file")
    base = folder if origin is None else Path(origin).parent
    text = read_text(copy)
    first = takewhile(lambda line: line.startswith(CHANGE), text.splitlines())
    with placed(Where(file=str(copy)), ValueError):
        changes_of_study = [str(json.loads(line.removeprefix(CHANGE))) for line in first]
    document = with_changes(parse_yaml(text, file=str(copy)), (*changes_of_study, *changes))
    experiment = build_experiment(document, ExperimentFiles(base=base))
    if result.get("backend") == "local":  # set by an option of tune, not in the experiment file
        experiment = replace(experiment, trials=replace(experiment.trials, backend="local"))
    return ReadStudy(folder=folder, experiment=experiment, result=result)


def study_state(folder: Path) -> dict[str, Any]:
    """Return the object of ``show --json``.

    Trials are in the order of their numbers. The outcome is null until a trial has ended;
    ``running`` is true while the journal has an attempt without an end.
    """
    path = folder / JOURNAL
    where = Where(file=str(path))
    try:
        with open(path, "rb", opener=not_linked) as lines:
            remember_input(lines.fileno())
            bodies = parse(lines, file=str(path)).bodies
    except OSError as error:
        message = f"no study can be read here: {error.strerror}; name the folder that tune made"
        raise InputError(message, where=where) from error
    if not bodies:
        raise InputError("the study has not begun: its journal has no header", where=where)
    header = read_header(bodies, file=str(path))
    replay = replay_journal(bodies, lambda event: event, file=str(path))
    trials, last = list(map(_trial_state, replay.trials.values())), replay.last or header
    ending = last.ending if isinstance(last, Stopped) else None
    has_measured = any(trial["outcome"] == "measured" for trial in trials)
    recommended = last.recommendation if isinstance(last, Stopped) and has_measured else None
    best, best_s = _best(trials, recommended)
    state = {
        "schema": SCHEMA,
        "study": str(folder),
        "experiment": header.experiment,
        "backend": header.backend,
        "ending": ending,
        "ending_text": next((text for name, text in ENDINGS.items() if name == ending), None),
        "last_event_at": last.at,
        "seconds": last.seconds,
        "best": best,
        "best_s": best_s,
        "recommendation": recommended,
        "trials": trials,
    }
    return dict(redact_values(state))  # a journal of an older version may have secrets


def _best(
    trials: Sequence[Mapping[str, Any]], recommended: Mapping[str, Any] | None
) -> tuple[int | None, float | None]:
    """Return trial number and time of the recommended strategy, or else of the fastest one."""
    if recommended is not None:
        number = recommended["trial"]
        return number, None if number is None else recommended["time_s"]
    means = _mean_times(trials)
    best = min(means, key=lambda number: (means[number], number), default=None)
    return best, None if best is None else means[best]


def _mean_times(trials: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return each strategy's mean time, keyed by its first trial's number.

    Unsteady trials count only if all trials are unsteady.
    """
    times: dict[int, list[float]] = {}
    measured = [trial for trial in trials if trial["mean_s"] is not None]
    for trial in list(filter(trial_tells_time, measured)) or measured:
        first = trial["number"] if trial["repeats"] is None else trial["repeats"]
        times.setdefault(first, []).append(float(trial["mean_s"]))
    return {first: sum(run_times) / len(run_times) for first, run_times in times.items()}


def _trial_state(entry: JournalTrial[Started]) -> dict[str, Any]:
    begun = entry.trial
    outcome = NO_OUTCOME if entry.outcome is None else outcome_to_json(entry.outcome)
    keys = ("number", "strategy", "predicted_s", "repeats", "chosen", "group")
    of_outcome = ("outcome", "measured_s", "mean_s", "spread_s", "warnings", "reason")
    return {
        **{key: getattr(begun, key) for key in keys},
        **{key: outcome[key] for key in of_outcome},
        "running": entry.running,
        "started_at": begun.at,
    }
