"""The heterogeneous model of AMP: the TransGAN generator on four nodes of four V100.

Li, Wang, Xing, Zhang: "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity
Awareness", arXiv:2210.07297. Everything that is given stands in ``het_model.yaml``. Twelve wide
blocks work on 81 tokens, twelve narrow ones on 82,944: cuts that count layers are far off.

Plan it, and compare with the published planner:

    python experiments/het_model.py
    python experiments/het_model.py --cost-model amp-2022 --all
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Plan the heterogeneous model of AMP: TransGAN on 4 x 4 V100.")
