from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.crossings import CrossingModel, StageGroup, common_parts
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import stage_groups
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Stage, StageOptions, Strategy

HALF = 2
"""Bytes of an element."""

ELEMENTS = 50
"""Of a sample, at every boundary of the toy model."""


def model_of(experiment: Experiment) -> CrossingModel:
    return CostModel(experiment=experiment).stages.crossings


def group(experiment: Experiment, *rows: tuple[int, ...], shares: tuple[int, ...]) -> StageGroup:
    """Build a stage from the devices of its data-parallel ranks."""
    devices = np.array(rows)
    topology = CostModel(experiment=experiment).topology
    rings = topology.unequal_rings(devices.tolist())
    paths = tuple(rings.paths[index] for index in rings.index)
    return StageGroup(devices=devices, shares=shares, rings=paths)


def test_a_rank_sends_its_samples_over_the_link_within_its_node(experiment: Experiment) -> None:
    left = group(experiment, (0,), shares=(4,))
    right = group(experiment, (1,), shares=(4,))
    sends = model_of(experiment).sends(left, right, ((0,), (0,)), 1)
    seconds = 4 * ELEMENTS * HALF / 1000
    assert sends[:, 0] == pytest.approx([seconds, seconds])


def test_ranks_share_the_interface_of_the_node_that_all_send_to(experiment: Experiment) -> None:
    left = group(experiment, (0,), (1,), shares=(2, 2))
    right = group(experiment, (2,), shares=(4,))
    sends = model_of(experiment).sends(left, right, ((0, 0), (0,)), 2)
    assert sends[0, 0] == pytest.approx(4 * ELEMENTS * HALF / 100)


def test_parts_of_the_samples_are_told_apart(experiment: Experiment) -> None:
    left = group(experiment, (0,), (2,), shares=(3, 1))
    right = group(experiment, (1,), (3,), shares=(3, 1))
    sends = model_of(experiment).sends(left, right, ((0, 1), (0, 1)), 1)
    assert sends[0] == pytest.approx([3 * ELEMENTS * HALF / 1000, ELEMENTS * HALF / 1000])


def test_a_larger_tensor_parallel_group_gets_the_tensor_on_every_rank(
    experiment: Experiment,
) -> None:
    left = group(experiment, (0,), shares=(1,))
    right = group(experiment, (2, 3), shares=(1,))
    forward, backward = model_of(experiment).sends(left, right, ((0,), (0,)), 1)[:, 0]
    assert forward == pytest.approx(2 * ELEMENTS * HALF / 100)
    assert backward == pytest.approx(ELEMENTS * HALF / 100)


def test_slices_are_put_together_at_the_slower_end(experiment: Experiment) -> None:
    traits = replace(experiment.traits, sliced_activations=True, sliced_gradients=True)
    given = replace(experiment, traits=traits)
    left = group(given, (0, 1), shares=(1,))
    right = group(given, (2, 3), shares=(1,))
    sliced = model_of(given).sends(left, right, ((0,), (0,)), 1)
    ring = left.rings[0]
    expected = ELEMENTS * HALF / 100 + ELEMENTS * HALF / 2 / ring.bytes_per_s + ring.step_s
    assert sliced[:, 0] == pytest.approx([expected, expected])


def test_every_message_of_a_rank_is_started(experiment: Experiment) -> None:
    constants = replace(experiment.constants, collective_start_s=0.5)
    given = replace(experiment, constants=constants)
    left = group(given, (0,), shares=(2,))
    right = group(given, (2,), (3,), shares=(1, 1))
    sends = model_of(given).sends(left, right, ((0,), (0, 0)), 1)
    assert sends[0, 0] == pytest.approx(2 * 0.5 + 2 * ELEMENTS * HALF / 100)


def test_parts_end_where_every_stage_has_a_border() -> None:
    assert common_parts([(2, 2), (1, 1, 1, 1)]) == ((0, 1), (0, 0, 1, 1))


def test_a_strategy_without_shares_gives_every_replica_a_micro_batch(
    experiment: Experiment,
) -> None:
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2))
    strategy = Strategy(stages=(stage,), micro_batch_size=3, num_micro_batches=1, placement=(0, 2))
    (found,) = stage_groups(CostModel(experiment=experiment).topology, strategy)
    assert found.shares == (3, 3)
    assert found.ends.tolist() == [0, 3, 6]
