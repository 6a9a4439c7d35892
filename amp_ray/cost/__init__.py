"""Time and memory of a strategy."""
