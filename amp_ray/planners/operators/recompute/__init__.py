"""Choose which operators of a stage to recompute, so that it fits into memory in the least time."""
