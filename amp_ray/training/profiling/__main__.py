"""``python -m amp_ray.training.profiling JOB.json``: one rank of a profile run."""

import sys

from amp_ray.training.profiling.program import main
from amp_ray.training.program import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
