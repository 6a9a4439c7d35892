"""The evaluator, compiled and as plain Python, says what the readable composition says."""

import os
import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.compiled import UNCOMPILED
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.strategies.strategy import Strategy
from goldens.drawn_experiments import drawn_experiment
from goldens.drawn_strategies import Drawing
from support.composition import largest_difference

EQUAL = 1e-12


@st.composite
def drawn(draw: st.DrawFn) -> tuple[CostModel, list[Strategy]]:
    """Draw an experiment of any runtime, and a few strategies of it."""
    seed = draw(st.integers(0, 10**6))
    _, experiment = drawn_experiment(seed)
    drawing = Drawing(experiment=experiment, rng=random.Random(seed))
    return CostModel(experiment=experiment), list(drawing.strategies(3))


@given(drawn())
@settings(max_examples=60)
def test_it_adds_up_what_the_readable_composition_adds_up(
    case: tuple[CostModel, list[Strategy]],
) -> None:
    cost_model, strategies = case
    for strategy in strategies:
        assert largest_difference(cost_model, strategy) < EQUAL


@given(drawn())
@settings(max_examples=20)
def test_cuts_that_move_are_priced_as_a_strategy_of_its_own(
    case: tuple[CostModel, list[Strategy]],
) -> None:
    cost_model, strategies = case
    for strategy in strategies:
        if strategy.is_interleaved or strategy.is_sliced:
            continue
        costs = cost_model.stage_costs(PlacedStages.of_strategy(strategy))
        for cut in range(1, strategy.pp):
            bounds = list(strategy.bounds)
            bounds[cut] += 1
            if bounds[cut] < bounds[cut + 1]:
                moved = strategy.with_bounds(bounds)
                alone = cost_model.estimate(moved)
                assert cost_model.estimate_from(costs, strategy).strategy == strategy
                assert cost_model.estimate_from(costs, moved) == alone


def test_it_says_the_same_as_plain_python() -> None:
    prices = [
        subprocess.run(
            [sys.executable, "-c", PRICES],
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for variables in ({}, {UNCOMPILED: "1"})
    ]
    assert prices[1][0].endswith("evaluator.py")
    assert prices[0][1:] == prices[1][1:]


PRICES = """
import random
from amp_ray.cost.kernels import evaluator
from amp_ray.cost.model import CostModel
from goldens.drawn_experiments import drawn_experiment
from goldens.drawn_strategies import Drawing
print(evaluator.__file__)
for seed in range(0, 600, 40):
    _, experiment = drawn_experiment(seed)
    model = CostModel(experiment=experiment)
    for strategy in Drawing(experiment=experiment, rng=random.Random(seed)).strategies(2):
        estimate = model.estimate(strategy)
        print(estimate.breakdown, estimate.peak_memory_bytes)
"""
