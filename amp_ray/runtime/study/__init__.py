"""A study: its folder, journal and lock, the loop that drives it, and its results."""
