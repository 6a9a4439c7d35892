"""Points to measure for a profile, their records, and the tables made of them."""
