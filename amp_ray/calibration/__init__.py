"""Calibration: fits constants to trials, with priors, robust losses and standard errors."""
