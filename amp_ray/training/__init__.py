"""The program that runs on every rank of a trial or of a profile run, and measures it.

Run as ``python -m amp_ray.training JOB.json`` on every rank, with ``RANK``,
``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the
environment. Importing this package imports neither torch nor DeepSpeed, starts
no thread and creates no device context.

``bounds`` index the program's list of layers:

=========  =====================================================================
family     layers
=========  =====================================================================
gpt2       0 embedding (tokens and positions), 1..n block, n+1 norm,
           n+2 head (logits and loss; uses the token embedding's weights
           unless ``tied_embedding`` is false)
llama      0 embedding (tokens), 1..n block, n+1 norm, n+2 head (separate
           weights unless ``tied_embedding`` is true)
transgan   0 input (latent vector to the lowest picture), 1..sum(depth) block,
           sum(depth)+1 head (to RGB and loss). Up-sampling has no parameters
           and no index: it belongs to the first block after it.
=========  =====================================================================

``shapes.layer_kinds`` returns the same list as data.
"""

from amp_ray.training.job import Job, read_job
from amp_ray.training.program import main, preload

__all__ = ["Job", "main", "preload", "read_job"]
