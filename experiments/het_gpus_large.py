"""Two generations of a data centre: a Llama of 13 billion parameters on 64 A100 and 64 H100.

Everything that is given stands in ``het_gpus_large.yaml``.

    python experiments/het_gpus_large.py
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan a Llama on 64 A100 and 64 H100.")
