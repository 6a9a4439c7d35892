"""What plans with their own device groups are compared by before they are simulated."""

from collections.abc import Sequence
from itertools import pairwise

from amp_ray.arrays import FloatArray
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.search.stage_groups.cut_prices import CutBounds
from amp_ray.search.stage_groups.device_group import DeviceGroups
from amp_ray.search.stage_groups.options import GroupCosts, GroupOption, placed
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy


def objective_s(device_groups: DeviceGroups, strategy: Strategy) -> float:
    """Return what plans of one candidate are compared by: a closed form of their time.

    It is the sum of stages and cuts, one more slowest stage for each further micro-batch, and the
    longest step end. A stage goes at the pace of its slowest rank, layer by layer; where transfers
    block, the slowest stage counts with the cut behind it, and with what the one before it costs at
    least. A step end is gradient sync by the stage's
    own rings and the optimizer step; at both ends of the pipeline what tied weights take is added,
    as if the other end were alike and on the nearest other node. Parameters count as in
    `DeviceGroups.parameters`.

    Args:
        device_groups: Of the experiment.
        strategy: One recompute for all stages.
    """
    cost_model, stages = device_groups.cost_model, PlacedStages.of_strategy(strategy)
    nodes = set(cost_model.topology.node_of_device[list(strategy.placement)].tolist())
    recompute = strategy.recompute
    assert recompute is not None
    costs = GroupCosts(
        device_groups=device_groups,
        candidate=GroupsCandidate(
            micro_batch_size=sum(stages.shares[0]),
            num_micro_batches=strategy.num_micro_batches,
            recompute=recompute,
            zero=strategy.zero,
        ),
        one_node=len(nodes) == 1,
    )
    groups = [
        costs.option(costs.device_groups.of_devices(devices), shares)
        for devices, shares in zip(stages.grids, stages.shares, strict=True)
    ]
    given = cost_model.experiment
    took = [
        float(costs.slowest_s(group)[stage.first_layer : stage.end_layer].sum())
        + given.constants.host_s_per_micro_batch
        for group, stage in zip(groups, strategy.stages, strict=True)
    ]
    cuts = [
        float(cut_s(cost_model, pair)[cut])
        for pair, cut in zip(pairwise(groups), strategy.bounds[1:-1], strict=True)
    ]
    blocked = [0.0] * len(groups)
    if given.traits.blocking_transfers:
        blocked = blocked_s(cost_model, groups, strategy.bounds[1:-1], cuts)
    slowest = max(own + cut for own, cut in zip(took, blocked, strict=True))
    pipeline = sum(took) + sum(cuts) + (strategy.num_micro_batches - 1) * slowest
    return (
        pipeline + max(step_ends_s(costs, groups, strategy)) + given.constants.host_s_per_iteration
    )


def cut_s(cost_model: CostModel, pair: tuple[GroupOption, GroupOption]) -> FloatArray:
    """Return what both messages between two stages take, at every boundary.

    Args:
        cost_model: Of the experiment.
        pair: The stage before the cut and the one after it.
    """
    both: FloatArray = cost_model.messages.between(*placed(pair)).everywhere()[0]
    return both


def blocked_s(
    cost_model: CostModel,
    groups: Sequence[GroupOption],
    inner: Sequence[int],
    cuts_s: Sequence[float],
) -> list[float]:
    """Return what cuts add to the bottleneck of every stage, where transfers block.

    Args:
        cost_model: Of the experiment.
        groups: The stages.
        inner: Boundaries of the cuts.
        cuts_s: Their prices.
    """
    bounds = CutBounds(model=cost_model.messages)
    before = [0.0]
    for group, cut in zip(groups[1:], inner, strict=True):
        bound = bounds.bound(
            group.device_group, group.shares, other_nodes=group.device_group.begins_nodes
        )
        before.append(float(bounds.seconds(bound, behind=False)[cut]))
    return [own + cut for own, cut in zip(before, [*cuts_s, 0.0], strict=True)]


def step_ends_s(
    costs: GroupCosts, groups: Sequence[GroupOption], strategy: Strategy
) -> list[float]:
    """Return the step end of every stage."""
    last = len(groups) - 1
    times_s = []
    for index, (group, stage) in enumerate(zip(groups, strategy.stages, strict=True)):
        fixed_s, s_per_parameter = group.device_group.step_end
        held = float(costs.device_groups.parameters[stage.first_layer : stage.end_layer].sum())
        is_end = last > 0 and index in (0, last)
        tied_s = costs.tied_s(group.device_group) if is_end else 0.0
        times_s.append(fixed_s + s_per_parameter * held / stage.options.tp + tied_s)
    return times_s
