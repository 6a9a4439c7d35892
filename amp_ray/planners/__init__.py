"""Published planners' formulas, kept for comparison only.

Nothing outside this package may depend on what is in here: the project's own
planner has one cost model and one exact solver, and neither is here.
"""
