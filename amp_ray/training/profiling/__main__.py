"""``python -m amp_ray.training.profiling JOB.json``: one rank of a profile run."""

import os
import sys

from amp_ray.training.profiling.program import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a communication thread that waits for a dead peer must not keep us alive.
    os._exit(code)
