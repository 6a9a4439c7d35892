"""Every plan of operators of tiny experiments, to be scored one by one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.operators.cost import OperatorCostModel
from amp_ray.planners.operators.strategy import operator_strategy, recomputed_operators
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.recompute import AUTO
from amp_ray.strategies.strategy import Strategy
from support.aceso import EXPERIMENT, GPT_ROWS, aceso_files
from support.experiments import experiment_from

OPERATORS = (
    "conv1",
    "layer1-0-conv1",
    "layer1-0-bn3",
    "layer1-0-relu",
    "layer1-1-conv1",
    "layer1-1-bn3",
    "layer1-1-relu",
    "layer2-0-conv1",
    "fc",
)
_CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (3, 1))


def tiny_experiment(
    seed: int,
    most_operators: int = 5,
    *,
    per_operator: bool = False,
    recompute: str | None = None,
) -> Experiment:
    """Draw nodes, memory, batch and recompute, if none is given.

    The model has a few operators of a ResNet; where attention runs again, it is a GPT of a layer.
    """
    chance = random.Random(seed)
    model, rows = "resnet_x", (*OPERATORS[: chance.randrange(2, most_operators)], OPERATORS[-1])
    nodes, slots = chance.choice(_CLUSTERS)
    if recompute == "selective":
        model, rows, nodes, slots = "gpt_tiny", GPT_ROWS, 1, min(nodes * slots, 3)
    files = aceso_files(
        model,
        rows,
        sizes=chance.choice([(1, 2, 4), (1, 4), (1, 2)]),
        algorithms=chance.choice([(0,), (0,), (0, 1)]),
        seed=seed,
    )
    memory = f"memory_gib: {chance.uniform(2.52, 2.95):.3f}"
    text = EXPERIMENT.replace("gpt_tiny", model).replace("num_layers: 2", "num_layers: 1")
    text = text.replace(
        "count: 2, device: T4, slots: 2,",
        f"count: {nodes}, device: T4, slots: {slots}, {memory},",
    )
    text = text.replace("batch_size: 16", f"batch_size: {chance.choice([2, 4, 8])}")
    more = (
        f"search: {{space: operator, per_operator: {str(per_operator).lower()}}}\n"
        f"recompute: {recompute or chance.choice(['auto', 'auto', 'auto', 'none'])}\n"
        f"zero_stage: {chance.choice([0, 1])}\n"
    )
    return experiment_from(text + more, {f"p/{name}": file for name, file in files.items()})


def with_memory(experiment: Experiment, memory_bytes: int) -> Experiment:
    """Return an experiment whose devices, all alike, have so much memory."""
    nodes = experiment.cluster.nodes
    device = replace(nodes[0].device, memory_bytes=memory_bytes)
    nodes = tuple(replace(node, device=device) for node in nodes)
    return replace(experiment, cluster=replace(experiment.cluster, nodes=nodes))


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorOracle:
    """Scores all plans of one experiment."""

    cost_model: OperatorCostModel

    def front(self, candidate: GroupsCandidate) -> list[tuple[float, float]]:
        """Return peaks in bytes and seconds of the plans that none undercuts in both."""
        found: list[tuple[float, float]] = []
        for peak, seconds in sorted(
            (max(each.peak_memory_bytes), each.iteration_time_s)
            for each in map(self.cost_model.estimate, self._plans(candidate))
            if isinstance(each, Estimate)
        ):
            if not found or seconds < found[-1][1]:
                found.append((peak, seconds))
        return found

    def _plans(self, candidate: GroupsCandidate) -> Iterator[Strategy]:
        """Give every cut, share of devices, degrees per stage and set of what runs again."""
        experiment, number = self.cost_model.experiment, self.cost_model.profile.num_operators
        for sizes in _compositions(experiment.cluster.num_devices):
            uses = [self._uses(size, candidate.micro_batch_size) for size in sizes]
            for inner in combinations(self._cuts, len(sizes) - 1):
                bounds = list(pairwise((0, *inner, number)))
                for chosen, again in product(product(*uses), self._again):
                    yield operator_strategy(
                        [
                            [(*use, bit) for bit in again[first:end]]
                            for (first, end), use in zip(bounds, chosen, strict=True)
                        ],
                        samples_per_micro_batch=candidate.micro_batch_size,
                        num_micro_batches=candidate.num_micro_batches,
                        zero=self.cost_model.zero,
                    )

    @cached_property
    def _again(self) -> list[tuple[bool, ...]]:
        """What may run again: any operators, or those of the kind that is given."""
        profile, recompute = self.cost_model.profile, self.cost_model.experiment.recompute
        if recompute == AUTO:
            return list(product((False, True), repeat=profile.num_operators))
        return [tuple(recomputed_operators(profile, recompute.kind))]

    @cached_property
    def _cuts(self) -> list[int]:
        """Where stages may begin: not within what runs again whatever the stage."""
        number, starts_block = (
            self.cost_model.profile.num_operators,
            self.cost_model.profile.starts_block,
        )
        if len(self._again) > 1:
            return list(range(1, number))
        again = self._again[0]
        return [i for i in range(1, number) if not (again[i - 1] and again[i]) or starts_block[i]]

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
