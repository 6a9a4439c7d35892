"""The heterogeneous space: every stage has its own device group, tp, dp and shares.

Devices are taken in rows of equal ones, node after node. A stage takes the next devices of one
kind, or the end of one kind and the begin of others; in small clusters any number of the next
devices of every kind. All orders of kinds are looked at, devices left over at the begin of a row
stay idle, and tensor-parallel groups stay inside nodes unless the limits allow more. Within this
scope the plan is the best by `objective_s`; the best few are judged by the simulated schedule.
"""

from dataclasses import replace

from amp_ray.cost.estimate import Infeasible, Reason, Result
from amp_ray.search.ranking import leader_order
from amp_ray.search.stage_groups.device_group import DeviceGroups
from amp_ray.search.stage_groups.groups_objective import objective_s
from amp_ray.search.stage_groups.groups_solution import GroupsSolution, solve_groups
from amp_ray.strategies.candidate import GroupsCandidate

__all__ = ["DeviceGroups", "GroupsSolution", "objective_s", "plan_stage_groups", "solve_groups"]

NO_GROUPS = "no device group can be a stage"


def plan_stage_groups(
    device_groups: DeviceGroups, candidate: GroupsCandidate, *, bounded: bool = True
) -> Result:
    """Choose stages, their devices, tp, dp and shares, and estimate the result.

    Args:
        device_groups: Of the experiment; one for all its candidates.
        candidate: Micro-batch, its number, recompute.
        bounded: Whether the estimate tells what no plan undercuts.

    Returns:
        The best estimate. Where nothing fits, one that would be good without limits.
    """
    solution = solve_groups(device_groups, candidate)
    if not solution.estimates:
        detail = f"micro-batch {candidate.micro_batch_size}, within the limits of the search"
        return Infeasible(candidate=candidate, reason=Reason(kind=NO_GROUPS, detail=detail))
    best = min(solution.estimates, key=leader_order)
    if not (bounded and best.feasible):
        return best
    bound_s = device_groups.time_bound(candidate.recompute).least_s(candidate)
    return replace(best, lower_bound_s=min(bound_s, best.iteration_time_s))
