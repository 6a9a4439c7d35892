"""The space of placements: a uniform candidate on the devices that suit each stage best.

The order of nodes over stages, the cuts and the memory are chosen together. From the outside in:
`plan` finds the best placements, beginning with the simple `chains`, and judges them by simulation,
which `improve` then makes shorter; `step_end` searches them around the exact solver; `problem` is
what that solver gets; `build_problem` decides how many placements go into it; `graph` holds them
all, made of `nodes` and `node_picks`, priced by `prices` with `matchings`; `ranks` leads back to
devices.
"""

from amp_ray.search.placement.best_placements import (
    PlacementSolution,
    plan_listed,
    plan_placement,
    simple_plans,
    solve_placement,
)
from amp_ray.search.placement.improve import reorder
from amp_ray.search.placement.simple_placements import objective_s

__all__ = [
    "PlacementSolution",
    "objective_s",
    "plan_listed",
    "plan_placement",
    "reorder",
    "simple_plans",
    "solve_placement",
]
