"""Checks of hosts: findings from probed facts, each with a command that fixes the problem."""
