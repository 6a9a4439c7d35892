"""Nodes of unequal size: a GPT of 2.8 billion parameters on 16 A100, 12 V100 and 16 T4.

Everything that is given stands in ``het_gpus_uneven.yaml``. No number here is a power of two that
need not be one: 44 devices, nodes of 8 and of 4, a batch of 192.

    python experiments/het_gpus_uneven.py
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan a GPT on 16 A100, 12 V100 and 16 T4.")
