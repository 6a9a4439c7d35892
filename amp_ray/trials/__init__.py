"""About real runs, without running any: what is launched, and what came of it."""
