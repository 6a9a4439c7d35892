"""What a program prints under several hash seeds: sets and dictionaries must not show."""

import subprocess
import sys
from pathlib import Path
from typing import Final

LIBRARY: Final = str(Path(__file__).parents[1])
"""What PYTHONPATH has to name, so that a program finds this package."""

SEEDS = ("0", "1")
TIMEOUT_S = 300.0
"""Of one run; a guard against a hang."""


def outputs_by_hash_seed(script: str) -> set[bytes]:
    """Return the different outputs of a Python program; one where no seed matters.

    Args:
        script: Its source.

    Raises:
        subprocess.SubprocessError: If it fails or hangs.
    """
    return {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": LIBRARY},
            check=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        ).stdout
        for seed in SEEDS
    }
