"""The heterogeneous space: every stage has its own device group, tp, dp and shares.

The devices of one kind form a row, node after node. A stage takes the next devices of one row, or
the end of one row and the begin of others; in small clusters, any number of the next devices of
every row, in any order within the stage. The search covers all orders of kinds. Devices left over
at the begin of a row stay idle, and tensor-parallel groups stay inside nodes unless the limits
allow more. Within this scope the search finds the best plan by `objective_s`; the simulated
schedule decides between the best few, and `simulated_moves` then leaves the scope.

**Four devices by hand.** Node 0 has two quick devices, which take 1 s per sample and layer, node 1
two slow ones, which take 2 s. A micro-batch has six samples, the model three equal layers; there
are eight micro-batches. A cut takes 1 s; the step end takes 1 s in a stage with several devices of
one node, and 10 s in a stage on both nodes.

`device_groups` lists the groups that one stage can take: zero, one or two devices of each kind,
starting after the devices that later stages have taken. Each kind has ``3 + 2 + 1 = 6`` ways, and 3
of them take nothing, so there are ``6 * 6 - 3 * 3 = 27`` groups; ``3 * 3`` of them have both kinds,
in two orders, so 36 in all. `group_options` splits the samples by speed. All four devices in one
stage take 2, 2, 1 and 1 samples, so a layer takes 2 s; the two devices of a pair take 3 samples
each, so a layer takes 3 s (quick) or 6 s (slow). The closed form of `groups_objective` then
compares two plans:

- one stage of all devices: ``3 * 2 = 6`` s per micro-batch, ``8 * 6 + 10 = 58`` s;
- the quick pair with two layers and the slow pair with one: both take 6 s, so the first micro-batch
  takes ``6 + 1 + 6`` s, the others 6 s each, ``13 + 7 * 6 + 1 = 56`` s.

The second is the best of all plans. The solver behind `groups_problem` finds it too; it counts
layers from the last stage, so its solution is read backwards:

    >>> import numpy as np
    >>> from amp_ray.clusters.device import CATALOGUE
    >>> from amp_ray.clusters.cluster import Cluster, Link, Node
    >>> from amp_ray.partition.problem import PartitionProblem
    >>> from amp_ray.partition.tables import OptionTable, StageTables
    >>> from amp_ray.partition.step_end import StepEndProblem, StepEndTerm, solve_with_step_end
    >>> from amp_ray.search.stage_groups.device_groups import device_graph
    >>> from amp_ray.search.stage_groups.group_options import split_by_speed, within_pieces
    >>> link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    >>> nodes = [
    ...     Node(name=name, num_slots=2, device=CATALOGUE[name], intra=link, inter=link)
    ...     for name in ("V100-16", "T4")
    ... ]
    >>> graph = device_graph(Cluster(nodes=tuple(nodes)))
    >>> len(graph.pieces)
    36
    >>> def layer_s(pieces):  # a piece is a kind and devices [first, end) of its row
    ...     ranks = [end - first for _, first, end in pieces]
    ...     speeds = [(1.0, 0.5)[kind] for kind, _, _ in pieces]
    ...     samples = zip(split_by_speed(6, ranks, speeds), ranks, speeds)
    ...     return max(max(within_pieces((part,), (num,))) / rate for part, num, rate in samples)
    >>> layer_s(((0, 0, 2), (1, 0, 2))), layer_s(((0, 0, 2),)), layer_s(((1, 0, 2),))
    (2.0, 3.0, 6.0)
    >>> times_s = np.array([layer_s(pieces) for pieces in graph.pieces])
    >>> sizes = [sum(end - first for _, first, end in pieces) for pieces in graph.pieces]
    >>> ends_s = [
    ...     10.0 if len(pieces) > 1 else float(size > 1)
    ...     for pieces, size in zip(graph.pieces, sizes)
    ... ]
    >>> problem = PartitionProblem(
    ...     tables=StageTables(
    ...         time_prefix_s=np.outer(times_s, np.arange(4)), cut_time_s=np.ones((1, 4))
    ...     ),
    ...     options=OptionTable(
    ...         time_row=np.arange(36),
    ...         from_state=graph.from_state,
    ...         to_state=graph.to_state,
    ...         cut_row=np.where(graph.from_state > 0, 0, -1),
    ...     ),
    ...     num_micro_batches=8,
    ...     final_states=graph.final_states,
    ... )
    >>> nothing = np.zeros(36)
    >>> step_end = StepEndTerm(
    ...     weight_prefix=np.zeros(4), s_per_weight=nothing, fixed_s=np.array(ends_s)
    ... )
    >>> solution = solve_with_step_end(StepEndProblem(problem=problem, terms=(step_end,)))
    >>> solution.value_s, solution.lower_bound_s
    (56.0, 56.0)
    >>> [graph.pieces[option] for option in solution.options], solution.bounds
    ([((1, 0, 2),), ((0, 0, 2),)], (0, 1, 3))
"""

from amp_ray.cost.estimate import Infeasible, Reason, Result
from amp_ray.search.ranking import leader_order
from amp_ray.search.stage_groups.device_groups import DeviceGroups
from amp_ray.search.stage_groups.groups_objective import objective_s
from amp_ray.search.stage_groups.groups_solution import GroupsSolution, solve_groups
from amp_ray.strategies.candidate import GroupsCandidate

__all__ = ["DeviceGroups", "GroupsSolution", "objective_s", "plan_stage_groups", "solve_groups"]

NO_GROUPS = "no device group can be a stage"


def plan_stage_groups(device_groups: DeviceGroups, candidate: GroupsCandidate) -> Result:
    """Choose stages, their devices, tp, dp and shares, and estimate the result.

    If nothing fits, the estimate is of a plan that would be good without memory limits.
    """
    solution = solve_groups(device_groups, candidate)
    if not solution.estimates:
        detail = f"micro-batch {candidate.micro_batch_size}, within the limits of the search"
        return Infeasible(candidate=candidate, reason=Reason(kind=NO_GROUPS, detail=detail))
    return min(solution.estimates, key=leader_order)
