"""Compare the plans of searches with the recorded ones; end with 1 if one became slower.

``compare_plans.py [--record] [GLOB]``: with ``--record``, plan the cases whose names match anew and
keep their plans in tests/golden/plans.jsonl. A case is a mixed cluster (of `check_mixed` and
`bench_mixed`), an experiment of the repository or a small cluster of equal nodes. Recorded plans
are priced again, so that both times are of the present cost model.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search.ranking import Ranking, is_risky
from amp_ray.strategies.strategy import Strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from goldens.documents import REPOSITORY, experiment_of, short_record, strategy_of, values_of
from support.experiments import plain_document
from support.mixed_cases import CASES, case_text
from support.small_clusters import small_cluster_text
from support.uniform_clusters import uniform_cluster_text

PLANS: Final = REPOSITORY / "tests" / "golden" / "plans.jsonl"
SEEDS: Final = (1351, 1356, 1367, 1521, 1527, *range(1100, 1130), *range(1600, 1630))
"""Seeds of `small_cluster`; an annealing oracle has beaten the plans of the first five."""
NUM_UNIFORM: Final = 24
FILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "het_cluster": {},
    "het_gpus": {},
    "het_gpus_uneven": {},
    "het_gpus_large": {},
    "het_placement": {},
    "homogeneous": {},
    "het_model": {"search": {"space": "uniform", "idle_devices": False}},
}
"""Experiments of the repository, with keys to change: no time of het_model is measured at tp 3."""
SLOWER: Final = 0.005
"""By how much a plan may be slower than the recorded one, relatively."""
ROUNDING: Final = 1e-9
SAFE: Final = {"fastest": False, "safe": True}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the document of each case."""
    for number in range(NUM_UNIFORM):
        yield f"uniform-{number}", values_of(uniform_cluster_text(number))
    for name, changes in FILES.items():
        text = (REPOSITORY / "experiments" / f"{name}.yaml").read_text("utf-8")
        yield name, values_of(text, **changes)
    for name, model, count, kinds, batch, _ in CASES:
        text = case_text(model, count, kinds, batch)
        yield f"bench: {name}", dict(plain_document(text).values)
    for seed in SEEDS:
        yield f"small-{seed}", values_of(small_cluster_text(seed))


def planned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a case; return CPU seconds, fastest plan, fastest safe plan, and beaten rows."""
    experiment = experiment_of(values)
    start_s = time.process_time()
    ranking = plan_experiment(experiment, workers=ALONE, progress=lambda _, __: None).ranking
    answer: dict[str, Any] = {"cpu_s": round(time.process_time() - start_s, 3)}
    for key, plan in _plans(ranking).items():
        record = short_record(plan.strategy, experiment)
        answer[key] = {"iteration_time_s": plan.iteration_time_s, "strategy": record}
    if experiment.space == "uniform":
        answer["rows"] = _beaten_rows(experiment, ranking)
    return answer


def _plans(ranking: Ranking) -> dict[str, Estimate]:
    """Return the fastest feasible plan and the fastest safe one, as far as they exist."""
    rows = [row for row in ranking.results[: ranking.num_feasible] if isinstance(row, Estimate)]
    rows.sort(key=lambda row: row.iteration_time_s)
    safe = [row for row in rows if not is_risky(row)]
    return {key: of[0] for key, of in (("fastest", rows), ("safe", safe)) if of}


def _beaten_rows(experiment: Experiment, ranking: Ranking) -> dict[str, int]:
    """Count feasible rows, those that moving cuts by one layer makes faster, and the first row.

    A safe row must stay safe.
    """
    model = CostModel(experiment=experiment)
    rows = [row for row in ranking.results[: ranking.num_feasible] if isinstance(row, Estimate)]
    beaten = [_is_beaten(model, row) for row in rows]
    return {"num": len(beaten), "beaten": sum(beaten), "first_beaten": sum(beaten[:1])}


def _is_beaten(model: CostModel, row: Estimate) -> bool:
    for strategy in _moved(row.strategy):
        moved = model.estimate(strategy)
        fits = moved.feasible and (is_risky(row) or not is_risky(moved))
        if fits and moved.iteration_time_s < row.iteration_time_s * (1 - ROUNDING):
            return True
    return False


def _moved(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategy with a cut, or several in a row, one layer earlier and one later.

    Chunks stay where they are.
    """
    bounds = strategy.bounds if not strategy.is_interleaved else ()
    for first, last in combinations(range(1, len(bounds)), 2):
        for step in (-1, 1):
            inner = [bound + step for bound in bounds[first:last]]
            moved = [*bounds[:first], *inner, *bounds[last:]]
            if all(start < end for start, end in pairwise(moved)):
                yield strategy.with_bounds(moved)


def _record(only: str) -> int:
    """Plan cases and keep the answers."""
    kept = _recorded() if PLANS.exists() else {}
    every = dict(cases())
    for name, values in every.items():
        if fnmatch(name, only):
            kept[name] = {"name": name, "document": values, **planned(values)}
            print(name, kept[name]["cpu_s"], flush=True)
            lines = [
                json.dumps(kept[name], separators=(",", ":")) for name in every if name in kept
            ]
            PLANS.write_text("\n".join(lines) + "\n", "utf-8")
    return 0


def _recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded cases by name."""
    lines = PLANS.read_text("utf-8").splitlines()
    return {case["name"]: case for case in map(json.loads, lines)}


def _old_s(case: Mapping[str, Any], key: str) -> float | None:
    """Return the time of a recorded plan by the present cost model; None if there was none."""
    if key not in case:
        return None
    experiment = experiment_of(case["document"])
    strategy = strategy_of(case[key]["strategy"], experiment)
    return CostModel(experiment=experiment).estimate(strategy).iteration_time_s


def _compare(only: str) -> int:
    """Print a line per case, and sums; return 1 if a plan is slower than allowed."""
    print(f"{'case':18} {'plan':8} {'old s':>12} {'new s':>12} {'gap %':>8}  CPU s old, new")
    slower, cpu_s, rows = 0, [0.0, 0.0], [0, 0, 0]
    sums = {key: [0.0, 0.0] for key in SAFE}
    for name, case in _recorded().items():
        if not fnmatch(name, only):
            continue
        now = planned(case["document"])
        cpu_s = [cpu_s[0] + case["cpu_s"], cpu_s[1] + now["cpu_s"]]
        for key, total in sums.items():
            times = _old_s(case, key), now.get(key, {}).get("iteration_time_s")
            slower += _print_plan(name, key, times, (case["cpu_s"], now["cpu_s"]))
            for index, time_s in enumerate(times if None not in times else ()):
                total[index] += time_s or 0.0
        if "rows" in now:
            counts = [now["rows"][count] for count in ("num", "beaten", "first_beaten")]
            rows = [one + other for one, other in zip(rows, counts, strict=True)]
    for key, (old_s, new_s) in sums.items():
        gap = 100 * (new_s / old_s - 1) if old_s else 0.0
        print(f"{'sum':18} {key:8} {old_s:12.6g} {new_s:12.6g} {gap:+8.3f}")
    print(f"CPU: {cpu_s[0]:.1f} s recorded, {cpu_s[1]:.1f} s now")
    print("rows of uniform clusters: {}, beaten by moved cuts: {}, first rows: {}".format(*rows))
    print(f"{slower} plans slower by more than {100 * SLOWER:g} %")
    return int(slower > 0)


def _print_plan(
    name: str, key: str, times: tuple[float | None, float | None], cpu_s: tuple[float, float]
) -> bool:
    """Print the times of a plan, old and new; return whether it became slower."""
    old_s, new_s = times
    gap = (new_s or float("inf")) / old_s - 1 if old_s else (float("-inf") if new_s else 0.0)
    shown = [f"{time_s:12.6g}" if time_s else f"{'-':>12}" for time_s in times]
    print(
        f"{name:18} {key:8} {' '.join(shown)} {100 * gap:+8.3f}  {cpu_s[0]:.2f} {cpu_s[1]:.2f}",
        flush=True,
    )
    return gap > SLOWER


if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description=__doc__)
    PARSER.add_argument("--record", action="store_true", help="keep the plans of today")
    PARSER.add_argument("only", nargs="?", default="*", help="cases, as small-11*")
    OPTIONS = PARSER.parse_args()
    planned(values_of(uniform_cluster_text(0)))  # so that no case counts the load of kernels
    raise SystemExit((_record if OPTIONS.record else _compare)(OPTIONS.only))
