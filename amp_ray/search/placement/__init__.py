"""The space of placements: a uniform candidate on the devices that suit each stage best.

The order of nodes over stages, the cuts and the memory are chosen together. From the outside in:
`plan` judges the best placements by simulation, which `swap` and `climb` improve; `best` finds
them, beginning with the simple `chains`; `tail` searches them around the one exact solver;
`problem` is what that solver gets; `pose` decides how many placements go into it; `graph` holds
them all, made of `nodes` and their `picks`, priced by `prices`; `ranks` leads back to devices.
"""

from amp_ray.search.placement.best import PlacementSolution, solve_placement
from amp_ray.search.placement.chains import objective_s
from amp_ray.search.placement.plan import plan_placement

__all__ = ["PlacementSolution", "objective_s", "plan_placement", "solve_placement"]
