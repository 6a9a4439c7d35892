"""Cut a chain of operators into stages that recompute activations where memory is short."""
