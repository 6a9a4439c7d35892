"""Plans that stages with their own devices can express: wider than any search looks at."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import numpy as np

from amp_ray.cost.model import CostModel
from amp_ray.search.stage_groups.device_group import DeviceGroups
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Stage, Strategy

Groups = tuple[tuple[int, ...], ...]
"""Devices of every stage, in the order of their ranks."""

Use = tuple[int, tuple[int, ...]]
"""tp of a stage, and samples of its data-parallel ranks."""


def wide_plans(cost_model: CostModel, candidate: GroupsCandidate) -> Iterator[Strategy]:
    """Give all plans of a candidate: any devices, in any order, any tp, shares and cuts.

    Args:
        cost_model: Of a tiny experiment.
        candidate: Micro-batch, its number, recompute.
    """
    num_devices = cost_model.experiment.cluster.num_devices
    num_layers = cost_model.experiment.model.num_layers
    for count in range(1, num_devices + 1):
        for devices in permutations(range(num_devices), count):
            for inner in _all_cuts(count, num_layers):
                groups = tuple(devices[first:end] for first, end in pairwise((0, *inner, count)))
                for uses in product(*(_uses(cost_model, candidate, own) for own in groups)):
                    for cuts in combinations(range(1, num_layers), len(groups) - 1):
                        yield wide_plan(candidate, groups, uses, (0, *cuts, num_layers))


def random_wide_plan(
    rng: np.random.Generator, cost_model: CostModel, candidate: GroupsCandidate
) -> Strategy | None:
    """Draw a plan; None where the devices drawn cannot be stages.

    Args:
        rng: Source of randomness.
        cost_model: Of an experiment.
        candidate: Micro-batch, its number, recompute.
    """
    num_layers = cost_model.experiment.model.num_layers
    num_devices = cost_model.experiment.cluster.num_devices
    count = int(rng.integers(1, num_devices + 1))
    devices = rng.permutation(num_devices)[:count].tolist()
    if rng.integers(0, 2):
        devices.sort()
    pp = int(rng.integers(1, min(count, num_layers) + 1))
    inner = sorted(rng.choice(np.arange(1, count), pp - 1, replace=False).tolist())
    groups = tuple(tuple(devices[first:end]) for first, end in pairwise((0, *inner, count)))
    chosen = []
    for own in groups:
        uses = list(_uses(cost_model, candidate, own))
        if not uses:
            return None
        chosen.append(uses[int(rng.integers(len(uses)))])
    cuts = sorted(rng.choice(np.arange(1, num_layers), pp - 1, replace=False).tolist())
    return wide_plan(candidate, groups, chosen, (0, *cuts, num_layers))


def wide_plan(
    candidate: GroupsCandidate, groups: Groups, uses: Sequence[Use], bounds: Sequence[int]
) -> Strategy:
    """Return the plan of stages with these devices, uses and layers."""
    shares = [samples for _, samples in uses]
    even = len(set(shares)) == 1 and len(set(shares[0])) == 1
    return Strategy(
        stages=tuple(
            Stage(
                first_layer=first,
                end_layer=end,
                options=replace(candidate.options, tp=tp, dp=len(samples)),
                shares=None if even else samples,
            )
            for (tp, samples), (first, end) in zip(uses, pairwise(bounds), strict=True)
        ),
        micro_batch_size=shares[0][0] if even else candidate.micro_batch_size,
        num_micro_batches=candidate.num_micro_batches,
        placement=tuple(device for own in groups for device in own),
    )


def _uses(
    cost_model: CostModel, candidate: GroupsCandidate, devices: Sequence[int]
) -> Iterator[Use]:
    """Give every tp inside nodes, and every way to share samples out."""
    node_of_device = cost_model.experiment.cluster.node_of_device
    for tp in DeviceGroups(cost_model=cost_model).tps:
        dp, left = divmod(len(devices), tp)
        nodes = [node_of_device[device] for device in devices]
        inside = all(len(set(nodes[first : first + tp])) == 1 for first in range(0, len(nodes), tp))
        if not left and inside:
            for cuts in _all_cuts_of(dp, candidate.micro_batch_size):
                ends = (0, *cuts, candidate.micro_batch_size)
                yield tp, tuple(end - first for first, end in pairwise(ends))


def _all_cuts(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Give every way to cut a row into at most so many pieces."""
    for pieces in range(1, min(count, most) + 1):
        yield from _all_cuts_of(pieces, count)


def _all_cuts_of(pieces: int, count: int) -> Iterator[tuple[int, ...]]:
    """Give every way to cut a row into so many pieces."""
    yield from combinations(range(1, count), pieces - 1)
