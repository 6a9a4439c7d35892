"""Measures layers, collectives and links on the hosts."""
