"""What a study's folder tells when nobody drives it."""

import json
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from amp_ray.errors import InputError, Where, placed
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import ExperimentFiles, read_text
from amp_ray.runtime.study.folder import CHANGE, TRIALS
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
    """Read the result and the experiment of a study.

    The files that the experiment names are looked for where its own file was.
    """
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
