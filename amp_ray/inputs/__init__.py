"""Readers of files: experiments, strategies and profiles; messages name file, line and key."""
