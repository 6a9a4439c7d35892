"""``python -m amp_ray.training JOB.json``: one rank of a trial."""

import faulthandler
import os
import signal
import sys

from amp_ray.training.program import main

STDERR = 2
"""As a number: the stream of that name may be replaced."""

if __name__ == "__main__":
    # Whoever is ended at the trial's limit says where it was: in a hang, nothing else can.
    faulthandler.register(signal.SIGTERM, file=STDERR, chain=True)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that waits for a dead peer must not keep us alive.
    os._exit(code)
