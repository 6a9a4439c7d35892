"""Cut a chain of operators into stages, with recompute if memory is short."""
