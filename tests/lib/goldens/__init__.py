"""Golden data of the cost model: strategies with their figures, and plans of searches."""
