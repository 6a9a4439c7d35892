"""What a study's folder tells: its result and experiment, or what its journal says meanwhile."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from amp_ray.errors import InputError, Where, placed
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import ExperimentFiles, read_text
from amp_ray.runtime.study.folder import CHANGE, JOURNAL, TRIALS
from amp_ray.runtime.study.journal import parse
from amp_ray.runtime.study.result import ENDINGS
from amp_ray.search.rows import SCHEMA
from amp_ray.spec.build import build_experiment
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.json_text import parse_json
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_json import strategy_from_json
from amp_ray.spec.yaml_text import parse_yaml, with_changes
from amp_ray.trials.launch import TIMELINE_FILE

_RESULT = "result.json"
_EXPERIMENT = "experiment.yaml"
_CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStudy:
    """A study that is read, not driven."""

    folder: Path
    experiment: Experiment
    result: dict[str, Any]  # the object of ``tune --json``

    def strategy(self, position: int | None) -> tuple[Strategy, float | None]:
        """Return the strategy at a position of its ranking, or the recommended one, and time."""
        where = Where(file=str(self.folder / _RESULT))
        rows = [row for row in self.result["ranking"] if row["feasible"]]
        chosen = self.result.get("recommendation") if position is None else None
        if chosen is None:
            if (position or 1) > len(rows):
                message = f"--position {position or 1}: {len(rows)} strategies of it can run"
                raise InputError(message, where=where)
            chosen = rows[(position or 1) - 1]
        record = chosen["strategy"]
        strategy = strategy_from_json(record, self.experiment.cluster, file=where.file)
        return strategy, chosen.get("predicted_s", chosen.get("iteration_time_s"))

    def calibrated(self) -> Experiment:
        """Return the experiment with the constants that the study has fitted, where it has."""
        path = self.folder / _CALIBRATION
        return (
            with_calibration(self.experiment, path, transfer=True)
            if path.is_file()
            else self.experiment
        )

    def timeline(self, strategy: Strategy) -> dict[str, Any] | None:
        """Return what the last trial of a strategy left of what every rank did; None without."""
        for trial in reversed(self.result["trials"]):
            own = strategy_from_json(trial["strategy"], self.experiment.cluster)
            pattern = f"{trial['number']:04d}-*/**/{TIMELINE_FILE}"
            files = sorted((self.folder / TRIALS).glob(pattern)) if own == strategy else []
            if files:
                return parse_json(read_text(files[-1]), file=str(files[-1]))
        return None


def read_study(folder: Path, changes: tuple[str, ...] = ()) -> ReadStudy:
    """Read result and experiment of a study, whose files are looked for where its own file was."""
    if not (folder / _RESULT).is_file():
        message = "no study with a result: name an experiment file, or the folder that tune made"
        raise InputError(message, where=Where(file=str(folder)))
    file = folder / _RESULT
    result = parse_json(read_text(file), file=str(file))
    copy = folder / _EXPERIMENT
    origin = result.get("experiment_file")
    base = folder if origin is None else Path(origin).parent
    text = read_text(copy)
    first = takewhile(lambda line: line.startswith(CHANGE), text.splitlines())
    with placed(Where(file=str(copy)), ValueError):
        own = [str(json.loads(line.removeprefix(CHANGE))) for line in first]
    document = with_changes(parse_yaml(text, file=str(copy)), (*own, *changes))
    experiment = build_experiment(document, ExperimentFiles(base=base))
    return ReadStudy(folder=folder, experiment=experiment, result=result)


def study_state(folder: Path) -> dict[str, Any]:
    """Return the object of ``show --json``.

    Trials stand in the order of their numbers; one that has not ended has the outcome null, and
    ``running`` says whether an attempt of it is at work as far as the journal knows.
    """
    path = folder / JOURNAL
    where = Where(file=str(path))
    try:
        with path.open("rb") as lines:
            bodies = parse(lines, file=str(path)).bodies
    except OSError as error:
        message = f"no study can be read here: {error.strerror}; name the folder that tune made"
        raise InputError(message, where=where) from error
    if not bodies or bodies[0].get("event") != "study":
        raise InputError("the study has not begun: its journal has no header", where=where)
    header, trials = bodies[0], dict[int, dict[str, Any]]()
    ending, last = None, header
    for event in bodies[1:]:
        last = event
        _take(event, trials)
        ending = event.get("ending") if event["event"] == "stopped" else None
    means = _mean_times(trials)
    best = min(means, key=lambda number: (means[number], number), default=None)
    return {
        "schema": SCHEMA,
        "study": str(folder),
        "experiment": header.get("experiment"),
        "backend": header.get("backend"),
        "ending": ending,
        "ending_text": ENDINGS.get(ending) if ending else None,
        "last_event_at": last.get("at"),
        "seconds": last.get("seconds"),
        "best": best,
        "best_s": None if best is None else means[best],
        "trials": [trials[number] for number in sorted(trials)],
    }


def _mean_times(trials: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean time of every strategy that was measured, by its first trial."""
    times: dict[int, list[float]] = {}
    for number, trial in trials.items():
        if trial["measured_s"] is not None:
            first = number if trial["repeats"] is None else trial["repeats"]
            times.setdefault(first, []).append(float(trial["measured_s"]))
    return {first: sum(own) / len(own) for first, own in times.items()}


def _take(event: Mapping[str, Any], trials: dict[int, dict[str, Any]]) -> None:
    """Apply one event; kinds that say nothing of a trial are of no consequence."""
    kind, number = event["event"], event.get("number")
    told = ("outcome", "measured_s", "spread_s", "reason")
    if kind == "started" and isinstance(number, int):
        keys = ("strategy", "predicted_s", "repeats", "chosen", "group")
        trials[number] = {
            "number": number,
            **{key: event.get(key) for key in keys},
            **dict.fromkeys(told),
            "running": True,
            "started_at": event.get("at"),
        }
    elif kind == "interrupted" and number in trials:
        trials[number]["running"] = False
    elif kind == "ended" and number in trials:
        trials[number] |= {key: event.get(key) for key in told} | {"running": False}
    elif kind in {"stopped", "resumed"}:
        for trial in trials.values():
            trial["running"] = False
        for again in (event.get("alike") or {}).get("numbers", ()):
            trials[again] |= dict.fromkeys(told)
