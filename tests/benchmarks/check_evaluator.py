"""Compare the evaluator with the readable composition on random strategies of all runtimes.

``python tests/benchmarks/check_evaluator.py 2500`` draws so many experiments, four strategies each,
prints the largest relative difference, and ends with 1 if it exceeds 1e-12.
"""

import random
import sys
from typing import Final

from amp_ray.cost.model import CostModel
from goldens.drawn_experiments import drawn_experiment
from goldens.drawn_strategies import Drawing
from support.composition import largest_difference

MOST: Final = 1e-12
PER_EXPERIMENT: Final = 4


def main(num_experiments: int, first_seed: int = 10**7) -> int:
    """Compare the strategies of so many experiments."""
    worst, total = 0.0, 0
    for seed in range(first_seed, first_seed + num_experiments):
        document, experiment = drawn_experiment(seed)
        cost_model = CostModel(experiment=experiment)
        drawing = Drawing(experiment=experiment, rng=random.Random(seed))
        for strategy in drawing.strategies(PER_EXPERIMENT):
            difference = largest_difference(cost_model, strategy)
            total, worst = total + 1, max(worst, difference)
            if difference > MOST:
                print(f"seed {seed}: {difference:.2g}", document, strategy, sep="\n")
    print(f"{total} strategies of {num_experiments} experiments, at most {worst:.2g} apart")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
