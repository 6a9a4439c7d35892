"""Describes trials without running them: launch commands, and the parsing of outcomes."""
