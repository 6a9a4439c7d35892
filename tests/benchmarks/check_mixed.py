"""Compare plans of mixed clusters with those of an annealing oracle; end with 1 if one is beaten.

``check_mixed.py [--busy] [FIRST LAST [STEPS]]`` draws the clusters FIRST to LAST - 1; with
``--busy``, none of them may have idle devices. The oracle starts from the plans of the search and
from random strategies, and makes STEPS moves from each. A plan is beaten if the oracle's is faster
by more than half a percent: the fastest by the fastest, and the first row, which is safe if any
plan is, by the fastest safe one.
"""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search.ranking import Ranking, is_risky
from amp_ray.strategies.strategy import Strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from support.annealing_oracle import Annealing
from support.small_clusters import small_cluster

MOST_BEATEN = 0.005
STEPS, RESTARTS = 1_500, 5


class Compared(NamedTuple):
    """The plans of one cluster beside the oracle's, by whether they are safe."""

    plans: dict[bool, Estimate]
    oracle: Annealing
    bounds_s: dict[tuple[object, ...], float]  # lower bounds of rows, by the kind of strategy
    seconds: tuple[float, float]  # CPU time of the search and of the oracle

    def gap(self, *, safe: bool) -> float:
        """Return by how much the oracle's plan is faster; infinite if only the oracle has one."""
        if safe not in self.oracle.best:
            return -math.inf
        if safe not in self.plans:
            return math.inf
        return self.plans[safe].iteration_time_s / self.oracle.best[safe].iteration_time_s - 1

    @property
    def faults(self) -> Iterator[str]:
        """Yield what the oracle refutes."""
        for safe in (False, True):
            if self.gap(safe=safe) > MOST_BEATEN:
                yield f"beaten{' (safe)' if safe else ''}: {_named(self.oracle.best[safe])}"
        for plan in self.oracle.simulated:
            bound_s = self.bounds_s.get(_kind(plan.strategy), 0.0)
            if plan.feasible and plan.iteration_time_s < bound_s * (1 - 1e-9):
                yield f"{plan.iteration_time_s:.6g} s, below {bound_s:.6g} s: {_named(plan)}"


def compare(experiment: Experiment, *, seed: int, num_steps: int, restarts: int) -> Compared:
    """Plan an experiment, and let the oracle look for a faster plan."""
    start_s = time.process_time()
    ranking = plan_experiment(experiment, workers=ALONE, progress=lambda _, __: None).ranking
    planned_s = time.process_time()
    plans = _plans(ranking)
    bounds_s: dict[tuple[object, ...], float] = {}
    for row in ranking.results[: ranking.num_feasible]:
        if isinstance(row, Estimate) and row.lower_bound_s and row.strategy.options:
            bounds_s[_kind(row.strategy)] = row.lower_bound_s
    oracle = Annealing(cost_model=CostModel(experiment=experiment))
    starts = dict.fromkeys(plan.strategy for plan in plans.values())
    oracle.run(tuple(starts), seed=seed, num_steps=num_steps, restarts=restarts)
    seconds = planned_s - start_s, time.process_time() - planned_s
    return Compared(plans, oracle, bounds_s, seconds)


def _kind(strategy: Strategy) -> tuple[object, ...]:
    """Return a key of strategies that differ only in cuts and devices."""
    options = strategy.options if strategy.is_uniform else None
    return options, strategy.pp, strategy.micro_batch_size, strategy.num_micro_batches


def _plans(ranking: Ranking) -> dict[bool, Estimate]:
    """Return the fastest plan, and the fastest safe one, by whether it must be safe."""
    feasible = ranking.results[: ranking.num_feasible]
    plans = [result for result in feasible if isinstance(result, Estimate)]
    plans.sort(key=lambda plan: plan.iteration_time_s)
    safe = [plan for plan in plans if not is_risky(plan)]
    return {must: rows[0] for must, rows in ((False, plans), (True, safe)) if rows}


def _named(plan: Estimate) -> str:
    """Return the stages of a plan in one line."""
    strategy = plan.strategy
    stages = (
        f"{stage.end_layer - stage.first_layer} layers on {strategy.devices(index)} tp "
        f"{stage.options.tp}{'s' if stage.options.sequence_parallel else ''} "
        f"{stage.options.recompute} {stage.shares or ''}"
        for index, stage in enumerate(strategy.stages)
    )
    head = f"micro-batch {strategy.micro_batch_size} x {strategy.num_micro_batches}"
    return f"{head}, ZeRO {strategy.zero}; {'; '.join(stages)}"


def main(first: int, last: int, num_steps: int, *, all_busy: bool) -> int:
    """Print a row per cluster; return 1 if the oracle refutes one."""
    refuted = 0
    print("seed  plan s      oracle s    gap %   safe %  search s  oracle s  simulated  cluster")
    for seed in range(first, last):
        experiment = small_cluster(seed, all_busy=all_busy)
        row = compare(experiment, seed=seed, num_steps=num_steps, restarts=RESTARTS)
        times = [
            f"{source[False].iteration_time_s:<10.6g}" if False in source else f"{'-':10}"
            for source in (row.plans, row.oracle.best)
        ]
        gaps = (
            f"{100 * row.gap(safe=safe):7.3f}" if safe in row.oracle.best else f"{'-':>7}"
            for safe in (False, True)
        )
        nodes = " ".join(
            f"{node.num_slots}x{node.device.name}" for node in experiment.cluster.nodes
        )
        print(
            f"{seed:4}  {'  '.join(times)} {' '.join(gaps)}  {row.seconds[0]:8.2f}  "
            f"{row.seconds[1]:8.2f}  {len(row.oracle.simulated):9}  "
            f"{experiment.traits.name} {nodes}",
            flush=True,
        )
        faults = list(row.faults)
        refuted += bool(faults)
        for fault in faults:
            print(f"      {fault}", flush=True)
        for plan in dict.fromkeys(row.plans.values()) if faults else ():
            print(f"      plan: {_named(plan)}", flush=True)
    print(f"{refuted} of {last - first} clusters refuted")
    return int(refuted > 0)


if __name__ == "__main__":
    NUMBERS = [argument for argument in sys.argv[1:] if argument != "--busy"]
    FIRST, LAST, NUM_STEPS = (*map(int, NUMBERS), *(0, 60, STEPS)[len(NUMBERS) :])
    raise SystemExit(main(FIRST, LAST, NUM_STEPS, all_busy="--busy" in sys.argv))
