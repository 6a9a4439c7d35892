"""What a strategy costs: time and memory."""
