"""``python -m amp_ray.training JOB.json``: one rank of a trial."""

import faulthandler
import signal
import sys

from amp_ray.training.program import leave, main

STDERR = 2
"""As a number: the stream of that name may be replaced."""

if __name__ == "__main__":
    # Whoever is ended at the trial's limit says where it was: in a hang, nothing else can.
    faulthandler.register(signal.SIGTERM, file=STDERR, chain=True)
    leave(main(sys.argv[1:]))
