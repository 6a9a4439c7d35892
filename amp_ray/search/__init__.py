"""From an experiment to ranked strategies."""
