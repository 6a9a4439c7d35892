"""Readers of other planners' profile formats."""
