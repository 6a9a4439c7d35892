from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.planners.metis2024.plan import MetisPlan
from amp_ray.planners.metis2024.planner import MetisTranslation
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.metis_cases import metis_setting

GROUPS = (range(1), range(1, 2), range(2, 3), range(3, 5))
"""A model of five layers, the last two of which are Metis's last."""

UNIFORM: dict[str, Any] = {
    "type_order": ("T4", "A100"),
    "group_sizes": (2, 2),
    "degrees": ((2, 1), (2, 1)),
    "num_micro_batches": 2,
    "bounds": (0, 1, 4),
}
MIXED: dict[str, Any] = {
    "type_order": ("A100", "T4"),
    "group_sizes": (1, 3),
    "degrees": ((1, 1), (3, 1)),
    "num_micro_batches": 1,
    "bounds": (0, 2, 4),
}


def translation() -> MetisTranslation:
    """Translate for two A100, devices 0 and 1, and two T4."""
    return MetisTranslation(setting=metis_setting(), groups=GROUPS)


def test_stages_that_share_evenly_need_no_shares() -> None:
    strategy = translation().strategy(MetisPlan(**UNIFORM))
    assert strategy.is_uniform
    assert strategy.micro_batch_size == 2
    assert strategy.global_batch_size == 8


def test_bounds_count_our_layers() -> None:
    assert translation().strategy(MetisPlan(**UNIFORM)).bounds == (0, 1, 5)


def test_devices_stand_type_after_type() -> None:
    assert translation().strategy(MetisPlan(**UNIFORM)).placement == (2, 3, 0, 1)


def test_mixed_stages_tell_their_shares() -> None:
    strategy = translation().strategy(MetisPlan(**MIXED))
    assert [stage.shares for stage in strategy.stages] == [(8,), (5, 2, 1)]
    assert strategy.micro_batch_size == 8
    assert strategy.global_batch_size == 8


@pytest.mark.parametrize("plan", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_a_strategy_goes_back_to_its_plan(plan: dict[str, Any]) -> None:
    both = translation()
    assert both.plan(both.strategy(MetisPlan(**plan))) == MetisPlan(**plan)


def test_a_cut_within_one_of_its_layers_is_refused() -> None:
    strategy = translation().strategy(MetisPlan(**UNIFORM))
    first, second = strategy.stages
    moved = replace(strategy, stages=(replace(first, end_layer=4), replace(second, first_layer=4)))
    with pytest.raises(InputError, match=r"cuts at \[0, 1, 2, 3, 5\], not at 4"):
        translation().plan(moved)


def test_idle_devices_are_refused() -> None:
    stage = Stage(first_layer=0, end_layer=5, options=StageOptions(tp=1, dp=2))
    idle = Strategy(stages=(stage,), micro_batch_size=4, num_micro_batches=1, placement=(0, 1))
    with pytest.raises(InputError, match="uses every device"):
        translation().plan(idle)


def test_types_that_come_back_are_refused() -> None:
    strategy = translation().strategy(MetisPlan(**UNIFORM))
    with pytest.raises(InputError, match="all of one type after the other"):
        translation().plan(replace(strategy, placement=(0, 2, 1, 3)))


def test_other_shares_are_refused() -> None:
    strategy = translation().strategy(MetisPlan(**MIXED))
    first, second = strategy.stages
    other = replace(strategy, stages=(first, replace(second, shares=(4, 2, 2))))
    with pytest.raises(InputError, match=r"stage 1 shares samples as \(4, 2, 2\)"):
        translation().plan(other)


def test_recompute_is_refused() -> None:
    strategy = translation().strategy(MetisPlan(**UNIFORM))
    stages = tuple(
        replace(stage, options=replace(stage.options, recompute=FULL)) for stage in strategy.stages
    )
    with pytest.raises(InputError, match="knows no recompute"):
        translation().plan(replace(strategy, stages=stages))
