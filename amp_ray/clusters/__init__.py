"""Hardware: devices, nodes, links, and physical constants of the cost model."""
