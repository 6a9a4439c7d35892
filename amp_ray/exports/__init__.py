"""Files of other training programs: write them from a strategy, and read strategies from them."""
