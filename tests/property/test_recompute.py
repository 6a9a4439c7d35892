"""Recompute that a search chooses is as good as the best over all cuts and all patterns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.verdict import safe_memory_fraction
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition.exact import solve
from amp_ray.partition.problem import PartitionSolution
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.cuts import partition_problem
from amp_ray.search.ranking import is_risky
from amp_ray.search.recompute import RecomputeSearch, with_recompute
from amp_ray.search.space import candidates_of
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of
from support.experiments import experiment_from

TEXT = """\
name: tight
model: {family: gpt2, num_layers: 4, hidden_size: 256, num_heads: 8, sequence_length: 256,
        vocab_size: 1024}
cluster:
  nodes:
    - {count: 1, device: V100-16, slots: 6, intra_gbit_per_s: 400, inter_gbit_per_s: 20}
global_batch_size: 12
recompute: auto
traits: {fused_attention: false, fails_without_parameters: false}
"""
PICTURES = TEXT.replace(
    "{family: gpt2, num_layers: 4, hidden_size: 256, num_heads: 8, sequence_length: 256,\n"
    "        vocab_size: 1024}",
    "{family: transgan, depth: [2, 1, 1], hidden_size: 256, num_heads: 4, bottom_width: 8}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Every partition with every pattern of recompute, by plain sums over layers.

    Args:
        cost_model: Cost model of an experiment on equal devices.
        candidate: A candidate with tp 1.
        parts: Whether stages may recompute only a part of their blocks.
        memory_scale: The memory of every device is multiplied by it.
    """

    cost_model: CostModel
    candidate: Candidate
    parts: bool = True
    memory_scale: float = 1.0

    def best_s(self) -> float:
        """Return the least closed form of a partition that fits; infinite if none fits."""
        num_layers, pp = self.cost_model.experiment.model.num_layers, self.candidate.pp
        stages = {
            (stage, start, end): list(self._ways(stage, start, end))
            for stage in range(pp)
            for start, end in combinations(range(num_layers + 1), 2)
        }
        cuts = self._cuts()
        least = float("inf")
        for inner in combinations(range(1, num_layers), pp - 1):
            bounds = (0, *inner, num_layers)
            own = [stages[stage, *ends] for stage, ends in enumerate(pairwise(bounds))]
            cut_s = [0.0, *(cuts[index][cut] for index, cut in enumerate(inner)), 0.0]
            for took in product(*own):
                blocked = [t + a + b for t, (a, b) in zip(took, pairwise(cut_s), strict=True)]
                later = self.candidate.num_micro_batches - 1
                least = min(least, sum(took) + sum(cut_s) + later * max(blocked))
        return least

    def _cuts(self) -> list[np.ndarray]:
        """Return for each stage the seconds of the cut after it, by boundary."""
        time_s, row = self.cost_model.costs(self.candidate).messages.rows()
        return [time_s[index] for index in row]

    def _ways(self, stage: int, start: int, end: int) -> Iterator[float]:
        """Yield the time of a stage for every pattern that fits."""
        model = self.cost_model.experiment.model
        blocks = [layer for layer in range(start, end) if model.layers[layer].kind == "block"]
        for kind in ("selective", "full"):
            for number in range(len(blocks) + 1) if self.parts else {0, len(blocks)}:
                own = Recompute(kind=kind, layers=number) if number else NO_RECOMPUTE
                again = blocks[:number]
                memory = self.cost_model.memory(self._with(own))
                device = self.cost_model.experiment.cluster.device_types[0]
                limit = self.memory_scale * device.memory_bytes
                if memory.peak(stage, start, end) <= limit:
                    yield sum(
                        self._layer_s(kind if layer in again else "none")[layer]
                        for layer in range(start, end)
                    )

    def _layer_s(self, kind: str) -> np.ndarray:
        given = self.cost_model.experiment
        rank = Rank(
            device=given.cluster.device_types[0],
            tp=1,
            micro_batch_size=self.candidate.micro_batch_size,
            precision=given.precision,
        )
        stages = PlacedStages.of_candidate(self.candidate, range(self.candidate.num_devices))
        ring = self.cost_model.topology.rings(stages.groups).paths[0]
        table, _ = self.cost_model.layer_costs.table(rank, ring, kind)  # type: ignore[arg-type]
        both_s: np.ndarray = table[0] + table[1]
        return both_s

    def _with(self, recompute: Recompute) -> Candidate:
        options = replace(self.candidate.options, recompute=recompute)
        return replace(self.candidate, options=options)


def tight(text: str, memory: float, pp: int, size: int) -> tuple[CostModel, Candidate]:
    """Return a cost model and candidate; ``memory`` is the ``share`` of `with_memory`."""
    experiment = experiment_from(text)
    candidate = grid_of(
        micro_batch_size=size, pp=pp, num_micro_batches=experiment.global_batch_size // size
    )
    return CostModel(experiment=with_memory(experiment, candidate, memory)), candidate


def with_memory(experiment: Experiment, candidate: Candidate, share: float) -> Experiment:
    """Set the memory of devices between the peaks of full (0) and no recompute (1), cut evenly."""
    model = CostModel(experiment=experiment)
    even = np.linspace(0, experiment.model.num_layers, candidate.pp + 1).astype(int).tolist()
    peaks = [
        max(
            model.estimate(
                Strategy.uniform(candidate, even, recompute=[own] * candidate.pp)
            ).peak_memory_bytes
        )
        for own in (Recompute(kind="full"), NO_RECOMPUTE)
    ]
    node = experiment.cluster.nodes[0]
    device = replace(node.device, memory_bytes=int(peaks[0] + share * (peaks[1] - peaks[0])))
    nodes = (replace(node, device=device),)
    return replace(experiment, cluster=replace(experiment.cluster, nodes=nodes))


CASES = [
    (text, share, pp, size)
    for text in (TEXT, PICTURES)
    for share in (-0.2, 0.0, 0.1, 0.35, 0.6, 0.95, 1.1)
    for pp, size in ((1, 2), (2, 1), (2, 4), (3, 1))
]


@pytest.mark.parametrize(("text", "share", "pp", "size"), CASES)
def test_cuts_and_recompute_are_the_best_of_all(
    text: str, share: float, pp: int, size: int
) -> None:
    cost_model, candidate = tight(text, share, pp, size)
    even = np.linspace(0, cost_model.experiment.model.num_layers, pp + 1).astype(int).tolist()
    estimate = with_recompute(cost_model, Strategy.uniform(candidate, even))
    bounds = []
    for memory_scale in (safe_memory_fraction(cost_model.experiment.constants), 1.0):
        search = RecomputeSearch(
            cost_model=cost_model,
            stages=PlacedStages.of_candidate(candidate, range(candidate.num_devices)),
            memory_scale=memory_scale,
        )
        solution = solve(search.problem[0])
        oracle = Oracle(cost_model=cost_model, candidate=candidate, memory_scale=memory_scale)
        if isinstance(solution, PartitionSolution):
            assert solution.value_s == pytest.approx(oracle.best_s(), rel=1e-9)
            bounds.append(solution.bounds)
        else:
            assert oracle.best_s() == float("inf")
        assert search.may_fit() == isinstance(solution, PartitionSolution)
        unlimited = search.unlimited_bounds()
        assert unlimited in {None, bounds[0] if bounds else None}
    assert estimate.feasible == bool(bounds)
    if bounds:  # of safe strategies, if there are any
        assert estimate.strategy.bounds == bounds[0]
        assert is_risky(estimate) == (len(bounds) == 1)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_runtime_that_knows_no_parts_is_given_none(share: float) -> None:
    cost_model, candidate = tight(TEXT, share, 3, 1)
    known = cost_model.experiment.traits
    whole = tuple(pattern for pattern in known.recompute if ":" not in pattern)
    traits = replace(known, recompute=whole)
    cost_model = CostModel(experiment=replace(cost_model.experiment, traits=traits))
    estimate = with_recompute(cost_model, Strategy.uniform(candidate, (0, 3, 5, 7)))
    assert {stage.options.recompute.layers for stage in estimate.strategy.stages} == {None}
    stages = PlacedStages.of_candidate(candidate, range(3))
    solution = solve(RecomputeSearch(cost_model=cost_model, stages=stages).problem[0])
    assert isinstance(solution, PartitionSolution)
    wanted = Oracle(cost_model=cost_model, candidate=candidate, parts=False).best_s()
    assert solution.value_s == pytest.approx(wanted, rel=1e-9)


def test_nothing_is_computed_again_where_all_fits() -> None:
    cost_model, candidate = tight(TEXT, 1.5, 2, 1)
    even = Strategy.uniform(candidate, (0, 4, 7))
    estimate = with_recompute(cost_model, even)
    plain = solve(
        partition_problem(
            cost_model.costs(candidate), cost_model.experiment.traits, np.empty(0, np.int64)
        )
    )
    assert isinstance(plain, PartitionSolution)
    assert estimate.strategy.recompute == NO_RECOMPUTE
    stages = PlacedStages.of_strategy(even)
    unlimited = RecomputeSearch(cost_model=cost_model, stages=stages).unlimited_bounds()
    assert unlimited == estimate.strategy.bounds == plain.bounds


@pytest.mark.parametrize("space", ["uniform", "placement", "heterogeneous"])
def test_every_space_fits_more_by_choosing(space: str) -> None:
    small = experiment_from(TEXT.replace("slots: 6", "slots: 2").replace("size: 12", "size: 4"))
    candidate = grid_of(pp=2, num_micro_batches=4)
    given = with_memory(small, candidate, 0.4)
    given = replace(given, limits=replace(given.limits, space=space))  # type: ignore[arg-type]
    planners = {
        own: AmpRayPlanner(experiment=replace(given, recompute=own))
        for own in (NO_RECOMPUTE, Recompute(kind="full"), AUTO)
    }
    found = {own: fastest_s(planner) for own, planner in planners.items()}
    assert found[AUTO] <= min(found.values())
    assert found[AUTO] < float("inf")


def fastest_s(planner: AmpRayPlanner) -> float:
    """Return the time of the fastest plan that fits; infinite if none fits."""
    results = map(planner.plan, candidates_of(planner.experiment))
    found = [result for result in results if isinstance(result, Estimate)]
    times = [estimate.iteration_time_s for estimate in found if estimate.feasible]
    return min(times, default=float("inf"))
