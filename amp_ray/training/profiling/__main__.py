"""``python -m amp_ray.training.profiling JOB.json``: one rank of a profile run."""

import sys

from amp_ray.training.program import leave, profile

if __name__ == "__main__":
    leave(profile(sys.argv[1:]))
