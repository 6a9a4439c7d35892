"""Plan a candidate on any devices: the best placements by the objective, judged by simulation."""

from dataclasses import replace

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.search.placement.best import solve_chains
from amp_ray.search.placement.chains import Chains, key_of
from amp_ray.search.placement.climb import climb
from amp_ray.search.placement.swap import swap_replicas
from amp_ray.search.ranking import leader_order
from amp_ray.spec.candidate import Candidate


def plan_placement(cost_model: CostModel, candidate: Candidate) -> Estimate:
    """Choose devices and cuts of a candidate, and estimate the result.

    Never worse than the candidate with rank ``r`` on device ``r``: that is among what is judged.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.

    Returns:
        The best estimate. Where nothing fits, the one that would be best without limits.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate)
    solution = solve_chains(chains)
    leaders = {key_of(leader): leader for leader in solution.leaders}
    for leader in solution.leaders:
        refined = chains.best(leader.placement)
        leaders.setdefault(key_of(refined), refined)
    best = min((chains.estimate(leader) for leader in leaders.values()), key=leader_order)
    best = swap_replicas(chains, best)
    return replace(climb(cost_model, best), lower_bound_s=solution.lower_bound_s)
