"""Compiled inner loops of the cost model."""
