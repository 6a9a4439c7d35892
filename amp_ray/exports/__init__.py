"""Training programs of others: what they are told of a strategy, and what they say of one."""
