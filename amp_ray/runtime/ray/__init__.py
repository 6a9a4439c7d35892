"""Search and trials in Ray workers."""
