"""What plans with their own device groups are compared by before they are simulated."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from amp_ray.cost.crossings import StageGroup, gathers, rank_table
from amp_ray.cost.kernels import crossings
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import stage_groups
from amp_ray.cost.topology import FloatArray
from amp_ray.search.heterogeneous.cut_bounds import CutBounds
from amp_ray.search.heterogeneous.facts import GroupFacts, facts_of
from amp_ray.search.heterogeneous.options import GroupCosts
from amp_ray.search.heterogeneous.shares import Shares
from amp_ray.spec.candidate import GroupsCandidate
from amp_ray.spec.strategy import Strategy


def objective_s(cost_model: CostModel, strategy: Strategy) -> float:
    """Return what plans of one candidate are compared by: a closed form of their time.

    It is the sum of stages and cuts, one more slowest stage for each further micro-batch, and the
    longest tail. A stage goes at the pace of its slowest rank, layer by layer; where transfers
    block, the slowest stage counts with the cut behind it, and with what the one before it costs at
    least. A tail is gradient sync by the stage's
    own rings and the optimizer step; at both ends of the pipeline what tied weights take is added,
    as if the other end were alike and on the nearest other node. Parameters count as in
    `FactTable.parameters`.

    Args:
        cost_model: Of the experiment.
        strategy: One recompute for all stages.
    """
    together = stage_groups(cost_model.topology, strategy)
    nodes = set(cost_model.topology.node_of_device[list(strategy.placement)].tolist())
    recompute = strategy.recompute
    assert recompute is not None
    costs = GroupCosts(
        facts=facts_of(cost_model),
        candidate=GroupsCandidate(
            micro_batch_size=sum(together[0].shares),
            num_micro_batches=strategy.num_micro_batches,
            recompute=recompute,
        ),
        one_node=len(nodes) == 1,
    )
    known = [costs.facts.of_devices(group.devices) for group in together]
    groups = [facts.group(group.shares) for facts, group in zip(known, together, strict=True)]
    given = cost_model.experiment
    took = [
        float(costs.slowest_s(facts, group.shares)[stage.first_layer : stage.end_layer].sum())
        + given.constants.host_s_per_micro_batch
        for facts, group, stage in zip(known, groups, strategy.stages, strict=True)
    ]
    cuts = [
        float(cut_s(cost_model, pair)[cut])
        for pair, cut in zip(pairwise(groups), strategy.bounds[1:-1], strict=True)
    ]
    blocked = [0.0] * len(groups)
    if given.traits.blocking_transfers:
        shared = [(facts, group.shares) for facts, group in zip(known, groups, strict=True)]
        blocked = blocked_s(cost_model, shared, strategy.bounds[1:-1], cuts)
    slowest = max(own + cut for own, cut in zip(took, blocked, strict=True))
    pipeline = sum(took) + sum(cuts) + (strategy.num_micro_batches - 1) * slowest
    return pipeline + _tail_s(costs, known, strategy) + given.constants.host_s_per_iteration


def cut_s(cost_model: CostModel, pair: tuple[StageGroup, StageGroup]) -> FloatArray:
    """Return what both messages between two stages take, at every boundary.

    Args:
        cost_model: Of the experiment.
        pair: The stage before the cut and the one after it.
    """
    model, (left, right) = cost_model.stages.crossings, pair
    one_part = [(0,) * group.dp for group in pair]
    ranks = rank_table(model.topology, pair, one_part)
    met = crossings(np.array([[0, 1]]), ranks, *model.links, 1)[0]
    seconds = model.seconds(met, left.tp, right.tp)
    if max(left.tp, right.tp) > 1:
        slower = np.maximum(*(gathers(group, (0,) * group.dp) for group in pair))
        seconds += model.gathered(slower, left.tp, right.tp)
    duplex = cost_model.experiment.traits.duplex_transfers
    both: FloatArray = seconds[:, 0].max(axis=0) if duplex else seconds[:, 0].sum(axis=0)
    return both


def blocked_s(
    cost_model: CostModel,
    known: Sequence[tuple[GroupFacts, Shares]],
    inner: Sequence[int],
    cuts_s: Sequence[float],
) -> list[float]:
    """Return what cuts add to the beat of every stage, where transfers block.

    Args:
        cost_model: Of the experiment.
        known: The stages.
        inner: Boundaries of the cuts.
        cuts_s: Their prices.
    """
    bounds = CutBounds(model=cost_model.stages.crossings)
    before = [0.0]
    for (facts, shares), cut in zip(known[1:], inner, strict=True):
        bound = bounds.bound(facts, shares, crossing=facts.begins_nodes)
        before.append(float(bounds.seconds(bound, behind=False)[cut]))
    return [own + cut for own, cut in zip(before, [*cuts_s, 0.0], strict=True)]


def _tail_s(costs: GroupCosts, known: Sequence[GroupFacts], strategy: Strategy) -> float:
    """Return the longest tail."""
    last = len(known) - 1
    times_s = []
    for index, (facts, stage) in enumerate(zip(known, strategy.stages, strict=True)):
        fixed_s, s_per_parameter = facts.tail
        held = float(costs.facts.parameters[stage.first_layer : stage.end_layer].sum())
        is_end = last > 0 and index in (0, last)
        tied_s = costs.tied_s(facts) if is_end else 0.0
        times_s.append(fixed_s + s_per_parameter * held / stage.tp + tied_s)
    return max(times_s)
