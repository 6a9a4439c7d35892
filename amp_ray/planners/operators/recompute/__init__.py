"""Choose the operators that a stage recomputes, so that it fits into memory in the least time."""
