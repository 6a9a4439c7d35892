"""Token slices: what they take, and which are best for a plan."""
