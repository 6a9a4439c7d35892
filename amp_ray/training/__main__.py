"""``python -m amp_ray.training JOB.json``: one rank of a trial."""

import faulthandler
import signal
import sys

from amp_ray.training.program import leave, main

STDERR = 2
"""File descriptor of stderr; ``sys.stderr`` may be replaced."""

if __name__ == "__main__":
    # A rank that is terminated at the time limit prints its stack: nothing else can locate a hang.
    faulthandler.register(signal.SIGTERM, file=STDERR, chain=True)
    leave(main(sys.argv[1:]))
