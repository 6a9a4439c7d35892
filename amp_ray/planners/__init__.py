"""Published planners' formulas, kept for comparison only.

Only `amp_ray.guests` names these packages. The project's own planner has one cost model and one
exact solver, and neither of them is here.
"""
