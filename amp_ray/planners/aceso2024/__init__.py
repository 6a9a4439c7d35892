"""The planner published as Aceso (2024): time and memory of a plan by its formulas."""
