"""Oracle of the placement search: every placement with every cut; and random clusters."""

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
    """Find the best placement by comparing every placement and every cut that fits the memory.

    Args:
        cost_model: Cost model of a small experiment.
        candidate: A candidate whose tensor-parallel groups fit into nodes.

    Returns:
        The smallest objective (closed form plus step end) and a strategy that has it; infinite and
        None if nothing fits.
    """
    best: tuple[float, Strategy | None] = (math.inf, None)
    for placement in all_placements(cost_model.experiment.cluster, candidate):
        for value_s, bounds in _values(cost_model, candidate, placement):
            if value_s < best[0]:
                best = value_s, Strategy.uniform(candidate, bounds, placement)
    return best


def all_placements(cluster: Cluster, candidate: Candidate) -> Iterator[tuple[int, ...]]:
    """Yield one of all placements that differ only in the order of replicas or of equal nodes.

    Nodes of one kind are equal unless links between two nodes make them different.

    Args:
        cluster: The nodes; devices that fill no tensor-parallel group within a node stay idle.
        candidate: The parallel degrees.
    """
    alike = _alike(cluster)
    left = [node.num_slots // candidate.options.tp for node in cluster.nodes]
    for stage_nodes in _stage_nodes(left, alike, (candidate.options.dp, candidate.pp), ()):
        yield _devices(cluster, stage_nodes, candidate.options.tp)


def random_experiment(
    rng: np.random.Generator, num_devices: int, *, racks: bool = False
) -> Experiment:
    """Draw a cluster with unequal nodes, and a chain of six layers at the limit of its memory.

    Args:
        rng: Source of randomness.
        num_devices: Number of devices of the cluster.
        racks: Whether nodes with an even number of devices are racks of two hosts.
    """
    kinds = [_random_node(rng, kind) for kind in range(int(rng.integers(1, 4)))]
    slots = _random_slots(rng, num_devices)
    nodes = [(number, str(rng.choice(kinds))) for number in slots]
    tied = str(bool(rng.integers(0, 2))).lower()
    hidden, words = int(rng.choice([256, 512, 1024])), rng.choice([512, 8192])
    links, batch = _random_link(rng, len(slots)), rng.choice([8, 16])
    entries = "\n".join(
        f"    - {{count: 2, slots: {number // 2}, rack: {{nodes: 2}}, {figures}}}"
        if racks and number % 2 == 0 and not links
        else f"    - {{count: 1, slots: {number}, {figures}}}"
        for number, figures in nodes
    )
    return experiment_from(f"""\
name: random
model: {{family: gpt2, num_layers: 3, hidden_size: {hidden}, num_heads: 8, sequence_length: 128,
        vocab_size: {words}, tied_embedding: {tied}}}
cluster:
  nodes:
{entries}
{links}
global_batch_size: {batch}
""")


def _random_slots(rng: np.random.Generator, num_devices: int) -> list[int]:
    """Draw the slots of every node: in most clusters the same number, in some any number."""
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
    """Yield the objective of every cut of one placement that fits and may run."""
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
    """Return for each node the first node that is equal to it."""
    linked = {node for pair in cluster.pair_links for node in pair}
    figures = [
        (node.device, node.num_slots, node.intra, node.inter, index if index in linked else -1)
        for index, node in enumerate(cluster.nodes)
    ]
    return [figures.index(own) for own in figures]


def _stage_nodes(
    left: list[int], alike: list[int], grid: tuple[int, int], stage_nodes: StageNodes
) -> Iterator[StageNodes]:
    """Yield all ways to choose the nodes of a grid's groups; take unused equal nodes in order."""
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
            continue  # only the placement with the first stage's replicas in order
        below = [units - (other == node) for other, units in enumerate(left)]
        yield from _stage_nodes(below, alike, grid, (*stage_nodes, node))


def _devices(cluster: Cluster, stage_nodes: StageNodes, tp: int) -> tuple[int, ...]:
    """Return the devices of all groups: each takes the next free devices of its node."""
    slots = [node.num_slots for node in cluster.nodes]
    free = [sum(slots[:node]) for node in range(len(slots))]
    placement: list[int] = []
    for node in stage_nodes:
        placement += range(free[node], free[node] + tp)
        free[node] += tp
    return tuple(placement)
