"""Every plan of a few blocks on a few devices, which tests score one by one."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Stage, Strategy
from support.experiments import experiment_from

_NODES = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2))


def block_experiment(seed: int, most_blocks: int = 5) -> Experiment:
    """Draw blocks that differ, nodes, memory, batch, runtime and recompute."""
    chance = random.Random(seed)
    lines = [
        f"    - {{name: b{index}, parameters: {chance.randrange(1, 60)}e6, "
        f"forward_gflops: {chance.randrange(0, 90)}, "
        f"activation_elements: {chance.randrange(1, 80)}e6, "
        f"boundary_elements: {chance.randrange(1, 8)}e6, "
        f"sharded: {str(chance.random() < 0.7).lower()}}}"
        for index in range(chance.randrange(1, most_blocks + 1))
    ]
    nodes, slots = chance.choice(_NODES)
    text = "\n".join(
        (
            "name: blocks",
            "model:",
            "  family: blocks",
            "  blocks:",
            *lines,
            "cluster:",
            "  nodes:",
            "    - {device: T4, intra_gbit_per_s: 50, inter_gbit_per_s: 10,",
            f"       count: {nodes}, slots: {slots}, memory_gib: {chance.uniform(3.2, 8.0):.3f}}}",
            f"global_batch_size: {chance.choice([2, 4, 8])}",
            f"recompute: {chance.choice(['auto', 'auto', 'none', 'full'])}",
            f"runtime: {chance.choice(['deepspeed', 'torch'])}",
            f"zero_stage: {chance.choice([0, 1])}",
            "search: {space: operator}",
        )
    )
    return experiment_from(text)


def block_plans(experiment: Experiment, candidate: GroupsCandidate) -> Iterator[Strategy]:
    """Yield every plan on the last devices, in order: all cuts, degrees and recompute per stage."""
    everyone, number = experiment.cluster.num_devices, experiment.model.num_layers
    for used in range(1, everyone + 1):
        for sizes in _compositions(used):
            if len(sizes) > number:
                continue
            uses = [_uses(size, candidate.micro_batch_size) for size in sizes]
            for inner in combinations(range(1, number), len(sizes) - 1):
                bounds = list(pairwise((0, *inner, number)))
                again = [_patterns(experiment, end - first) for first, end in bounds]
                for degrees, own in product(product(*uses), product(*again)):
                    yield _plan(candidate, bounds, degrees, own, everyone - used)


def _plan(
    candidate: GroupsCandidate,
    bounds: list[tuple[int, int]],
    degrees: tuple[tuple[int, int], ...],
    recompute: tuple[Recompute, ...],
    idle: int,
) -> Strategy:
    """Return one plan."""
    samples = candidate.micro_batch_size
    even = len({dp for _, dp in degrees}) == 1
    stages = tuple(
        Stage(
            first_layer=first,
            end_layer=end,
            options=replace(candidate.options, tp=tp, dp=dp, recompute=own),
            shares=None if even else (samples // dp,) * dp,
        )
        for (first, end), (tp, dp), own in zip(bounds, degrees, recompute, strict=True)
    )
    ranks = sum(tp * dp for tp, dp in degrees)
    return Strategy(
        stages=stages,
        micro_batch_size=samples // degrees[0][1] if even else samples,
        num_micro_batches=candidate.num_micro_batches,
        placement=tuple(range(idle, idle + ranks)),
    )


def _uses(size: int, samples: int) -> list[tuple[int, int]]:
    """Return the possible tp and dp of a stage."""
    return [
        (tp, size // tp)
        for tp in range(1, size + 1)
        if size % tp == 0 and samples % (size // tp) == 0
    ]


def _patterns(experiment: Experiment, blocks: int) -> list[Recompute]:
    """Return the possible recompute of a stage; never selective: blocks here have no attention."""
    if experiment.recompute != AUTO:
        return [experiment.recompute]
    some = [Recompute(kind="full", layers=number) for number in range(1, blocks)]
    return [NO_RECOMPUTE, *some, Recompute(kind="full")]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide a row of devices into consecutive groups."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in _compositions(total - first))
