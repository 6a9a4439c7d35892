"""The homogeneous experiment of AMP: GPT-2 (24 blocks) on four nodes of four T4.

Li, Wang, Xing, Zhang: "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity
Awareness", arXiv:2210.07297. Everything that is given stands in ``homogeneous.yaml``: model,
nodes, links, the published layer times and the batch of 32.

Plan it, and compare with the published planner:

    python experiments/homogeneous.py
    python experiments/homogeneous.py --cost-model amp-2022 --all
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan the homogeneous experiment of AMP: GPT-2 on 4 x 4 T4.")
