"""Candidates and strategies: how a model is trained, with the options of every stage."""
