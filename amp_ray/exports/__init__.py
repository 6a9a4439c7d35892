"""Files of other training programs: written from a strategy, and read as one."""
