"""Cut a chain of operators into stages that recompute what their memory cannot hold."""
