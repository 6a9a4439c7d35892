"""Search and trials by Ray workers."""
