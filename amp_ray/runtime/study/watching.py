"""What a study's journal tells while its driver is at work: read only, from any terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_ray.errors import InputError, Where
from amp_ray.runtime.study.folder import JOURNAL
from amp_ray.runtime.study.journal_lines import parse
from amp_ray.runtime.study.result import ENDINGS
from amp_ray.search.rows import SCHEMA


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
