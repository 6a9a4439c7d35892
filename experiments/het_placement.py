"""Where to put what on three V100 nodes and one T4 node: GPT-2 on the heterogeneous cluster of AMP.

The same as ``het_cluster.py``, but stages may run on any devices. The published planner tiles the
cluster and averages its devices; here the order of nodes over stages, the cuts and the memory are
chosen together. ``README.md`` compares both.

    python experiments/het_placement.py
    python experiments/het_placement.py --top 3
"""

from amp_ray.cli.script import run_experiment

if __name__ == "__main__":
    run_experiment(__file__, "Place GPT-2 on 3 x 4 V100 + 4 T4: devices and cuts together.")
