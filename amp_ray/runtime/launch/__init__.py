"""Runs one trial on its hosts and returns its outcome."""
