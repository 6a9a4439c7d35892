"""The planner published as Metis (2024): its formulas, and the best plans by them."""
