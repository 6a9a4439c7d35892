"""Files for replayed studies: a small experiment, and a table of its recorded trials."""

from collections.abc import Callable, Mapping
from pathlib import Path

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from support.experiments import SMALL

HEADER = ("tp", "pp", "dp", "micro_batch_size", "bounds", "measured_s")


def write_experiment(folder: Path, *replacements: tuple[str, str]) -> Path:
    """Write the small experiment into a folder, with parts of its text replaced.

    Returns:
        The file.
    """
    text = SMALL
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def table_text(
    experiment: Experiment,
    cells: Mapping[int, str] | None = None,
    measured_s: Callable[[float], float] = lambda predicted_s: predicted_s,
) -> str:
    """Return a table of all strategies of an experiment, in the order of its ranking.

    Args:
        experiment: The experiment.
        cells: Texts in place of a time (``oom``, ``failed``), by position from 0.
        measured_s: Returns the recorded time for a predicted one.
    """
    planner = AmpRayPlanner(experiment=experiment)
    ranking = search_candidates(planner, candidates_of(experiment), workers=ALONE)
    lines = [",".join(HEADER)]
    for position, result in enumerate(ranking.results):
        if not isinstance(result, Estimate):
            continue
        plan = result.strategy
        bounds = " ".join(map(str, plan.bounds))
        answer = (cells or {}).get(position) or repr(measured_s(result.iteration_time_s))
        row = (plan.tp, plan.pp, plan.dp, plan.micro_batch_size, bounds, answer)
        lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"
