"""TeraPipe's planner (2021): tries upper bounds on the slowest slice, in ascending order."""
