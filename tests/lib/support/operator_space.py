"""Every plan of operators of tiny experiments, to be scored one by one."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.operators import OperatorCostModel
from amp_ray.spec.candidate import GroupsCandidate
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.operator_strategy import operator_strategy
from amp_ray.spec.recompute import AUTO
from amp_ray.spec.strategy import Strategy
from support.aceso import EXPERIMENT, aceso_files
from support.experiments import experiment_from

_OPERATORS = (
    "conv1",
    "layer1-0-conv1",
    "layer1-0-bn3",
    "layer1-0-relu",
    "layer1-1-conv1",
    "fc",
)
_CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (3, 1))


def tiny_experiment(
    seed: int, most_operators: int = 5, *, per_operator: bool = False
) -> Experiment:
    """Draw nodes, memory, batch and recompute; the model has a few operators of a ResNet."""
    chance = random.Random(seed)
    rows = (*_OPERATORS[: chance.randrange(2, most_operators)], _OPERATORS[-1])
    nodes, slots = chance.choice(_CLUSTERS)
    files = aceso_files(
        "resnet_x",
        rows,
        sizes=chance.choice([(1, 2, 4), (1, 4), (1, 2)]),
        algorithms=chance.choice([(0,), (0,), (0, 1)]),
        seed=seed,
    )
    memory = f"memory_gib: {chance.uniform(2.52, 2.95):.3f}"
    text = EXPERIMENT.replace("gpt_tiny", "resnet_x").replace(
        "count: 2, device: T4, slots: 2,",
        f"count: {nodes}, device: T4, slots: {slots}, {memory},",
    )
    text = text.replace("batch_size: 16", f"batch_size: {chance.choice([2, 4, 8])}")
    more = (
        f"search: {{space: operator, per_operator: {str(per_operator).lower()}}}\n"
        f"recompute: {chance.choice(['auto', 'auto', 'auto', 'none'])}\n"
        f"zero_stage: {chance.choice([0, 1])}\n"
    )
    return experiment_from(text + more, {f"p/{name}": file for name, file in files.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorOracle:
    """Scores all plans of one experiment."""

    cost_model: OperatorCostModel

    def best_s(self, candidate: GroupsCandidate) -> float:
        """Return the least time of a plan that fits; infinite if none does."""
        results = map(self.cost_model.estimate, self._plans(candidate))
        return min(
            (
                each.iteration_time_s
                for each in results
                if isinstance(each, Estimate) and each.feasible
            ),
            default=math.inf,
        )

    def _plans(self, candidate: GroupsCandidate) -> Iterator[Strategy]:
        """Give every cut, share of devices, degrees per stage and set of what runs again."""
        given, number = self.cost_model.experiment, self.cost_model.profile.num_operators
        bits = (False, True) if given.recompute == AUTO else (False,)
        for sizes in _compositions(given.cluster.num_devices):
            uses = [self._uses(size, candidate.micro_batch_size) for size in sizes]
            for inner in combinations(range(1, number), len(sizes) - 1):
                bounds = list(pairwise((0, *inner, number)))
                ways = [
                    self._ways(own, end - first)
                    for (first, end), own in zip(bounds, uses, strict=True)
                ]
                for chosen, again in product(product(*ways), product(bits, repeat=number)):
                    yield operator_strategy(
                        [
                            [(*use, bit) for use, bit in zip(way, again[first:end], strict=True)]
                            for (first, end), way in zip(bounds, chosen, strict=True)
                        ],
                        samples_per_micro_batch=candidate.micro_batch_size,
                        num_micro_batches=candidate.num_micro_batches,
                    )

    def _ways(
        self, uses: list[tuple[int, int, int]], number: int
    ) -> list[tuple[tuple[int, int, int], ...]]:
        """Give every use of the operators of a stage: alike, unless they may differ."""
        if self.cost_model.experiment.limits.per_operator:
            return list(product(uses, repeat=number))
        return [(use,) * number for use in uses]

    def _uses(self, size: int, samples: int) -> list[tuple[int, int, int]]:
        """Give tp, dp and algorithm of a stage."""
        profile = self.cost_model.profile
        return [
            (tp, size // tp, algorithm)
            for tp in profile.tps
            if size % tp == 0 and samples % (size // tp) == 0
            for algorithm in (profile.algorithms if tp > 1 else (0,))
        ]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Give every way to share devices out in a row."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in _compositions(total - first))
