"""TeraPipe's planner (2021): slices by bounds on the slowest one, in ascending order."""
