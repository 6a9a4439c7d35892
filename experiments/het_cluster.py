"""The heterogeneous cluster of AMP: GPT-2 (24 blocks) on three V100 nodes and one T4 node.

Li, Wang, Xing, Zhang: "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity
Awareness", arXiv:2210.07297. Everything that is given stands in ``het_cluster.yaml``. The
published planner averages the layer times of both devices; ours gives each stage the time of the
devices that it runs on, so that the pipeline's slow node gets fewer layers.

Plan it, and compare with the published planner:

    python experiments/het_cluster.py
    python experiments/het_cluster.py --cost-model amp-2022 --all
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan the heterogeneous cluster of AMP: GPT-2 on 3 x 4 V100 + 4 T4.")
