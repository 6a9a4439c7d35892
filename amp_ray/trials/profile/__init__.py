"""What to measure for a profile, and what the records mean."""
