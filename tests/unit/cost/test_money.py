from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of
from support.experiments import small_experiment

PRICE_PER_GBYTE = 0.5
TOKENS = 8 * 128
HIDDEN_BYTES = 128 * 256 * 2
"""Of a sample at a boundary between blocks."""


def priced(*, zones: bool = True, prices: tuple[str, str] = ("3.6", "3.6")) -> Experiment:
    figures = "device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10"
    nodes = "".join(
        f"    - {{{figures}, zone: {zone}, price_per_device_hour: {price}}}\n"
        for zone, price in zip(("east", "west"), prices, strict=True)
    )
    link = f"{{between: [west, east], gbit_per_s: 1, price_per_gbyte: {PRICE_PER_GBYTE}}}"
    old = f"    - {{count: 2, {figures}}}\n"
    return small_experiment((old, nodes + (f"  links: [{link}]\n" if zones else "")))


def estimate(experiment: Experiment, *, tp: int, pp: int, dp: int, order: str = "0123") -> Estimate:
    candidate = grid_of(tp=tp, dp=dp, micro_batch_size=2, pp=pp, num_micro_batches=4 // dp)
    num_layers = experiment.model.num_layers
    bounds = (*range(0, num_layers - 1, num_layers // pp), num_layers)
    strategy = Strategy.uniform(candidate, (*bounds[:pp], num_layers))
    placement = tuple(map(int, order))
    model = CostModel(experiment=experiment)
    return model.with_columns(model.estimate(replace(strategy, placement=placement)))


def test_devices_cost_by_the_hour() -> None:
    found = estimate(priced(zones=False, prices=("3.6", "7.2")), tp=2, pp=2, dp=1)
    assert found.cost is not None
    assert found.cost.devices == pytest.approx(found.iteration_time_s * (2 * 3.6 + 2 * 7.2) / 3600)
    assert found.cost.egress == 0
    per_token = found.cost.per_iteration / TOKENS
    assert found.cost.to_json()["per_million_tokens"] == pytest.approx(per_token * 1e6)


def test_one_node_without_a_price_leaves_the_cost_unknown() -> None:
    experiment = priced()
    nodes = experiment.cluster.nodes
    unpriced = (nodes[0], replace(nodes[1], price_per_device_hour=None))
    cluster = replace(experiment.cluster, nodes=unpriced)
    assert estimate(replace(experiment, cluster=cluster), tp=2, pp=2, dp=1).cost is None


def test_activations_and_gradients_leave_the_zone_once_for_every_micro_batch() -> None:
    experiment = priced()
    untied = replace(experiment.model.shape, tied_embedding=False)
    layers = tuple(replace(layer, tied_parameters=0) for layer in experiment.model.layers)
    model = replace(experiment.model, shape=untied, layers=layers)
    found = estimate(replace(experiment, model=model), tp=1, pp=2, dp=2)
    assert found.cost is not None
    num_samples = 8
    num_bytes = 2 * num_samples * HIDDEN_BYTES
    assert found.cost.egress == pytest.approx(num_bytes * PRICE_PER_GBYTE / 1e9)


def test_a_gradient_ring_leaves_the_zone_twice_on_its_way_around() -> None:
    experiment = priced()
    found = estimate(experiment, tp=1, pp=1, dp=4)
    assert found.cost is not None
    gradient = experiment.traits.bytes_per_parameter("fp16").gradient
    crossings, num_bytes = 2, 2 * 3 / 4 * experiment.model.num_parameters * gradient
    assert found.cost.egress == pytest.approx(crossings * num_bytes * PRICE_PER_GBYTE / 1e9)


def test_stages_within_a_zone_pay_for_the_gradients_alone() -> None:
    # Ranks 0 and 1 are the replicas of the first stage: with this placement each is a zone.
    experiment = priced()
    apart = estimate(experiment, tp=1, pp=2, dp=2, order="0213")
    assert apart.cost is not None
    gradient = experiment.traits.bytes_per_parameter("fp16").gradient
    weights = CostModel(experiment=experiment).weights(1).of_stages(apart.strategy.bounds).sum()
    ring_bytes = 2 * 1 / 2 * weights * gradient
    assert apart.cost.egress == pytest.approx(2 * ring_bytes * PRICE_PER_GBYTE / 1e9)


def test_tensor_parallelism_across_zones_has_no_known_price() -> None:
    assert estimate(priced(), tp=2, pp=2, dp=1, order="0213").cost is None


def test_tokens_per_second() -> None:
    found = estimate(priced(), tp=2, pp=2, dp=1)
    assert found.tokens_per_s == pytest.approx(TOKENS / found.iteration_time_s)
