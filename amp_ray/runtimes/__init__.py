"""Runtimes: traits of the training programs, and their optimizers."""
