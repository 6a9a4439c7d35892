"""The part of a search that runs in Ray's workers; it imports no more than planning needs."""

import functools
import gc
import pickle

from amp_ray.search.candidate_queue import Work


@functools.lru_cache(maxsize=1)
def work_of(pickled: bytes) -> Work:
    """Unpickle a work once per worker, so that planners keep their caches."""
    work: Work = pickle.loads(pickled)  # noqa: S301 - from the process that this one works for
    gc.freeze()
    return work
