"""Four generations of GPUs: a GPT on one node each of V100, P100, T4 and A100.

The cluster is the example of Metis (Um et al., "Metis: Fast Automatic Distributed Training on
Heterogeneous GPUs", USENIX ATC 2024). Everything that is given stands in ``het_gpus.yaml``; layer
times come from the data sheets. To plan with measured ones in Metis's format, set ``profile:
{source: metis, path: FOLDER}``.

    python experiments/het_gpus.py
    python experiments/het_gpus.py --top 3
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan a GPT on 8 V100, 8 P100, 8 T4 and 8 A100.")
