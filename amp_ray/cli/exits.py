"""Exit codes, the same for every command."""

from typing import Final

SUCCESS: Final = 0
BAD_INPUT: Final = 2
NOT_FEASIBLE: Final = 3
TRIALS_FAILED: Final = 4
INTERRUPTED: Final = 130
