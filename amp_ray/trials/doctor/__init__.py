"""What the facts of a host mean: findings, each with the command that mends it."""
