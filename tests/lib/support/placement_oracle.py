"""Oracle of the placement search: every placement with every cut, and clusters to try it on."""

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition.problem import objective
from amp_ray.search.cuts import latest_starts, partition_problem
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from support.brute_force import is_allowed
from support.experiments import experiment_from

StageNodes = tuple[int, ...]
"""Node of every tensor-parallel group: stage by stage, replica by replica."""


def best_placement(cost_model: CostModel, candidate: Candidate) -> tuple[float, Strategy | None]:
    """Compare every placement and every cut that fits the memory.

    Args:
        cost_model: Of a small experiment.
        candidate: Its tensor-parallel groups fit into nodes.

    Returns:
        The smallest objective, closed form plus step end, and a strategy that has it; infinite and
        None where nothing fits.
    """
    best: tuple[float, Strategy | None] = (math.inf, None)
    for placement in all_placements(cost_model.experiment.cluster, candidate):
        for value_s, bounds in _values(cost_model, candidate, placement):
            if value_s < best[0]:
                best = value_s, Strategy.uniform(candidate, bounds, placement)
    return best


def all_placements(cluster: Cluster, candidate: Candidate) -> Iterator[tuple[int, ...]]:
    """Give every placement, one of those that differ by the order of replicas alone.

    Equal nodes are interchangeable, unless a link of their own tells them apart.

    Args:
        cluster: The nodes; devices that make no tensor-parallel group inside one stay idle.
        candidate: Degrees.
    """
    alike = _alike(cluster)
    left = [node.num_slots // candidate.options.tp for node in cluster.nodes]
    for stage_nodes in _stage_nodes(left, alike, (candidate.options.dp, candidate.pp), ()):
        yield _devices(cluster, stage_nodes, candidate.options.tp)


def random_experiment(rng: np.random.Generator, num_devices: int) -> Experiment:
    """Draw a cluster with unequal nodes, and a chain of six layers at the limit of its memory.

    Args:
        rng: Source of randomness.
        num_devices: Of the cluster.
    """
    kinds = [_random_node(rng, kind) for kind in range(int(rng.integers(1, 4)))]
    slots = _random_slots(rng, num_devices)
    nodes = "\n".join(
        f"    - {{count: 1, slots: {number}, {rng.choice(kinds)}}}" for number in slots
    )
    tied = str(bool(rng.integers(0, 2))).lower()
    hidden = int(rng.choice([256, 512, 1024]))
    return experiment_from(f"""\
name: random
model: {{family: gpt2, num_layers: 3, hidden_size: {hidden}, num_heads: 8, sequence_length: 128,
        vocab_size: {rng.choice([512, 8192])}, tied_embedding: {tied}}}
cluster:
  nodes:
{nodes}
{_random_link(rng, len(slots))}
global_batch_size: {rng.choice([8, 16])}
""")


def _random_slots(rng: np.random.Generator, num_devices: int) -> list[int]:
    """Draw the slots of every node: as many on each in most clusters, any number in some."""
    if rng.integers(0, 4):
        size = int(rng.choice([size for size in (1, 2, 4) if num_devices % size == 0]))
        return [size] * (num_devices // size)
    slots: list[int] = []
    while sum(slots) < num_devices:
        slots.append(int(rng.integers(1, min(4, num_devices - sum(slots)) + 1)))
    return slots


def _random_node(rng: np.random.Generator, kind: int) -> str:
    """Draw the figures of one kind of node."""
    memory_gib = rng.choice([2.6, 2.75, 3.0, 16.0])
    device = (
        f"{{name: kind{kind}, memory_gib: {memory_gib}, "
        f"memory_gbyte_per_s: {rng.choice([100, 300, 900])}, num_multiprocessors: 40, "
        f"fp16_tflops: {rng.choice([5, 20, 60])}}}"
    )
    return (
        f"device: {device}, intra_gbit_per_s: {rng.choice([20, 200])}, "
        f"inter_gbit_per_s: {rng.choice([1, 5, 10])}"
    )


def _random_link(rng: np.random.Generator, num_nodes: int) -> str:
    """Draw a link between two nodes in some clusters."""
    if num_nodes < 2 or rng.integers(0, 4):
        return ""
    low, high = sorted(rng.choice(num_nodes, 2, replace=False).tolist())
    return f"  links: [{{between: [node{low}, node{high}], gbit_per_s: {rng.choice([1, 20])}}}]"


def _values(
    cost_model: CostModel, candidate: Candidate, placement: tuple[int, ...]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Give the objective of every cut of one placement that may run."""
    given = cost_model.experiment
    costs = cost_model.costs(candidate, placement)
    problem = partition_problem(costs, given.traits, latest_starts(given))
    num_layers, options = given.model.num_layers, tuple(range(candidate.pp))
    for inner in combinations(range(1, num_layers), candidate.pp - 1):
        bounds = (0, *inner, num_layers)
        stages = enumerate(pairwise(bounds))
        if all(is_allowed(problem, start, end, stage) for stage, (start, end) in stages):
            strategy = Strategy.uniform(candidate, bounds, placement)
            breakdown = cost_model.estimate_from(costs, strategy).breakdown
            assert breakdown is not None
            step_end_s = breakdown.gradient_sync_s + breakdown.optimizer_s
            yield objective(problem, bounds, options).value_s + step_end_s, bounds


def _alike(cluster: Cluster) -> list[int]:
    """Return, per node, the first node that it can stand for."""
    linked = {node for pair in cluster.pair_links for node in pair}
    figures = [
        (node.device, node.num_slots, node.intra, node.inter, index if index in linked else -1)
        for index, node in enumerate(cluster.nodes)
    ]
    return [figures.index(own) for own in figures]


def _stage_nodes(
    left: list[int], alike: list[int], grid: tuple[int, int], stage_nodes: StageNodes
) -> Iterator[StageNodes]:
    """Extend groups by one, up to those of a grid; untouched equal nodes come in their order."""
    dp, pp = grid
    if len(stage_nodes) == dp * pp:
        yield stage_nodes
        return
    untouched: set[int] = set()
    for node, units in enumerate(left):
        fresh = node not in stage_nodes
        if not units or (fresh and alike[node] in untouched):
            continue
        if fresh:
            untouched.add(alike[node])
        if 0 < len(stage_nodes) < dp and node < stage_nodes[-1]:
            continue  # the replicas of the first stage are in order
        below = [units - (other == node) for other, units in enumerate(left)]
        yield from _stage_nodes(below, alike, grid, (*stage_nodes, node))


def _devices(cluster: Cluster, stage_nodes: StageNodes, tp: int) -> tuple[int, ...]:
    """Give every group the next free devices of its node."""
    slots = [node.num_slots for node in cluster.nodes]
    free = [sum(slots[:node]) for node in range(len(slots))]
    placement: list[int] = []
    for node in stage_nodes:
        placement += range(free[node], free[node] + tp)
        free[node] += tp
    return tuple(placement)
