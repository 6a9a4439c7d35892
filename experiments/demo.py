"""A small GPT-2 on this machine's CPU: the whole loop without a GPU and without a cluster.

Plan it, or prove the plan by real DeepSpeed trials of four ranks:

    python experiments/demo.py
    python experiments/demo.py --full --budget 6
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan a small GPT-2 on this machine's CPU, and prove it by trials.")
