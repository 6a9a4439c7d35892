"""A study: its folder, journal and lock, the driver's loop, and its results."""
