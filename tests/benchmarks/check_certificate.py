"""Compare certificates with the truth in synthetic worlds (`support.worlds`).

Run ``python tests/benchmarks/check_certificate.py [SEEDS] [EXPERIMENT] [BUDGET]``; an experiment is
a file of the folder ``experiments`` without its suffix. Per world, it prints how many certificates
held and how many of them were right, trials until the study stopped, what the other studies stated
and how many of them were right; last, how often statements of a kind came true in all worlds.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

sys.path[:0] = [str(Path(__file__).parents[1] / "lib")]

from amp_ray.runtime.files import load_experiment  # noqa: E402
from amp_ray.runtime.ray.searching import ALONE, search_candidates  # noqa: E402
from amp_ray.search.amp_ray_planner import AmpRayPlanner  # noqa: E402
from amp_ray.search.space import candidates_of  # noqa: E402
from amp_ray.tuner.state import TunerSettings, begin  # noqa: E402
from support.worlds import WORLDS, Study, TablePredictor, play_world  # noqa: E402

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
DEFAULTS = ("100", "demo", "20")
STATED = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.01)


def main() -> None:
    """Print a line per world, then the reliability of what was stated."""
    given = sys.argv[1:]
    seeds, name, budget = (*given, *DEFAULTS[len(given) :])
    experiment = load_experiment(EXPERIMENTS / f"{name}.yaml")
    planner = AmpRayPlanner(experiment=experiment)
    results = search_candidates(planner, candidates_of(experiment), workers=ALONE).results
    state = begin(experiment, results, TunerSettings(budget=int(budget)))
    predictor = TablePredictor.of(experiment, state.candidates)
    print(f"{name}: {len(state.candidates)} strategies, budget {budget}, {seeds} seeds per world")
    studies: list[Study] = []
    for world in WORLDS:
        played = [play_world(world, seed, state, predictor) for seed in range(int(seeds))]
        print(f"{world:>20}: {_row(played)}", flush=True)
        studies += played
    for low, high in pairwise(STATED):
        group = [study for study in studies if low <= study.confidence < high]
        if group:
            print(f"{_stated(group)} ({low:.0%} to {high:.0%})")


def _row(studies: Sequence[Study]) -> str:
    """Return what came of one world."""
    certified = [study for study in studies if study.certified]
    others = [study for study in studies if not study.certified]
    trials = [study.replay.num_trials for study in studies]
    text = (
        f"{len(certified):3} certified, {_right(certified)} right; {median(trials):4.1f} trials "
        f"({fmean(trials):4.1f} on average)"
    )
    return f"{text}; {_stated(others)}" if others else text


def _stated(studies: Sequence[Study]) -> str:
    stated = fmean(study.confidence for study in studies)
    return f"{len(studies):4} studies: {stated:.1%} stated, {_right(studies)} right"


def _right(studies: Sequence[Study]) -> str:
    return f"{fmean(study.right for study in studies):6.1%}" if studies else "   -"


if __name__ == "__main__":
    main()
