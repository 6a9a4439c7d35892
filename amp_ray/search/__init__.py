"""Search the strategies of an experiment and rank them."""
