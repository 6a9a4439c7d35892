from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from amp_ray.clusters.cluster import Cluster, Node
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import common_parts
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy, candidate_of
from support.experiments import SMALL as SMALL_TEXT
from support.experiments import experiment_from, small_experiment
from support.strategies import RECOMPUTE, clusters, strategies_on

SMALL = small_experiment()
NODES = next(line for line in SMALL_TEXT.splitlines() if line.startswith("    - "))
CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy on a cluster."""

    experiment: Experiment
    strategy: Strategy

    def _repr_pretty_(self, printer: RepresentationPrinter, _cycle: bool) -> None:  # noqa: FBT001
        given = self.experiment
        printer.text(f"<{given.traits.name} on {given.cluster}: {self.strategy}>")

    @property
    def cost_model(self) -> CostModel:
        return CostModel(experiment=self.experiment)

    @property
    def time_s(self) -> float:
        return self.cost_model.estimate(self.strategy).iteration_time_s

    def on(self, nodes: list[Node]) -> "Case":
        cluster = replace(self.experiment.cluster, nodes=tuple(nodes))
        return replace(self, experiment=replace(self.experiment, cluster=cluster))


@st.composite
def given_experiments(draw: st.DrawFn) -> Experiment:
    """Draw an experiment with the small model on any cluster with any runtime."""
    return replace(
        SMALL,
        cluster=draw(clusters()),
        traits=RUNTIMES[draw(st.sampled_from(sorted(RUNTIMES)))],
        precision="fp32",
    )


@st.composite
def cases(draw: st.DrawFn, experiments: st.SearchStrategy[Experiment] | None = None) -> Case:
    """Draw any strategy that covers the model, on any cluster unless ``experiments`` draws it."""
    experiment = draw(given_experiments() if experiments is None else experiments)
    num_layers = experiment.model.num_layers
    drawn = draw(strategies_on(experiment.cluster).filter(lambda found: found.pp <= num_layers))
    inner = sorted(draw(st.permutations(range(1, num_layers)))[: drawn.pp - 1])
    bounds = (0, *inner, num_layers)
    stages = tuple(
        replace(stage, first_layer=bounds[index], end_layer=bounds[index + 1])
        for index, stage in enumerate(drawn.stages)
    )
    return Case(experiment=experiment, strategy=replace(drawn, stages=stages))


@st.composite
def uniform_cases(draw: st.DrawFn) -> Case:
    """Draw a strategy whose stages have equal tp, dp and recompute."""
    experiment = draw(given_experiments())
    most = min(experiment.cluster.num_devices, experiment.model.num_layers)
    pp = draw(st.integers(1, most))
    tp = draw(st.integers(1, experiment.cluster.num_devices // pp))
    dp = draw(st.integers(1, experiment.cluster.num_devices // (pp * tp)))
    layers = range(1, experiment.model.num_layers)
    inner = sorted(draw(st.permutations(layers))[: pp - 1])
    bounds = (0, *inner, experiment.model.num_layers)
    recompute = draw(st.sampled_from(RECOMPUTE))
    devices = draw(st.permutations(range(experiment.cluster.num_devices)))
    candidate = Candidate(
        micro_batch_size=draw(st.sampled_from([1, 2, 3])),
        options=StageOptions(tp=tp, dp=dp, recompute=recompute),
        pp=pp,
        num_micro_batches=draw(st.integers(1, 4)),
    )
    strategy = Strategy.uniform(candidate, bounds, tuple(devices[: tp * dp * pp]))
    return Case(experiment=experiment, strategy=strategy)


@given(case=uniform_cases())
def test_uniform_stages_cost_what_their_candidate_costs(case: Case) -> None:
    known = case.cost_model.estimate(case.strategy)
    costs = case.cost_model.costs(candidate_of(case.strategy), case.strategy.placement)
    assert case.cost_model.estimate_from(costs, case.strategy) == known


@given(case=cases())
def test_every_strategy_has_an_estimate(case: Case) -> None:
    estimate = case.cost_model.with_columns(case.cost_model.estimate(case.strategy))
    assert 0 < estimate.iteration_time_s < float("inf")
    assert len(estimate.peak_memory_bytes) == len(estimate.memory_limit_bytes) == case.strategy.pp
    runs_again = case.experiment.traits.why_no_recompute(
        [stage.options.recompute for stage in case.strategy.stages]
    )
    runs_stages = case.strategy.is_uniform or case.experiment.traits.unequal_stages
    shares = case.experiment.traits.why_no_zero(case.strategy.zero, case.strategy.pp)
    degrees = case.experiment.traits.why_no_grid(
        max(stage.options.tp for stage in case.strategy.stages), case.strategy.pp
    )
    refusals = {runs_again, shares, degrees} - {None}
    assert estimate.launchable == (runs_stages and not refusals)


@given(case=cases(), data=st.data())
def test_better_links_never_cost_more(case: Case, data: st.DataObject) -> None:
    nodes = list(case.experiment.cluster.nodes)
    index = data.draw(st.integers(0, len(nodes) - 1))
    end = data.draw(st.sampled_from(["intra", "inter"]))
    link = getattr(nodes[index], end)
    faster = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 3)
    nodes[index] = replace(nodes[index], **{end: faster})
    assert case.on(nodes).time_s <= case.time_s * (1 + CLOSE)


@given(case=cases())
def test_stages_cost_the_same_on_renamed_nodes(case: Case) -> None:
    cluster, strategy = case.experiment.cluster, case.strategy
    count = len(cluster.nodes)
    turned = Cluster(
        nodes=tuple(replace(node, first_slot=99 - node.first_slot) for node in cluster.nodes[::-1]),
        pair_links={
            (count - 1 - high, count - 1 - low): link
            for (low, high), link in cluster.pair_links.items()
        },
    )
    first = np.cumsum([0, *(node.num_slots for node in turned.nodes)])
    moved = [
        int(first[count - 1 - node]) + slot
        for node, slot in zip(cluster.node_of_device, cluster.slot_of_device, strict=True)
    ]
    placement = tuple(moved[device] for device in strategy.placement)
    mirrored = Case(
        experiment=replace(case.experiment, cluster=turned),
        strategy=replace(strategy, placement=placement),
    )
    assert mirrored.time_s == pytest.approx(case.time_s, rel=CLOSE)


@given(data=st.data())
def test_boards_of_one_host_are_no_farther_apart_than_those_of_two(data: st.DataObject) -> None:
    network = data.draw(
        st.sampled_from(["inter_gbit_per_s: 10", "inter_gbit_per_s: 3200, inter_latency_us: 1"])
    )
    entries = [
        f"device: {data.draw(st.sampled_from(['T4', 'V100-32', 'A100-80', 'H100', 'B200']))}, "
        f"slots: {data.draw(st.integers(1, 4))}, {network}"
        for _ in range(data.draw(st.integers(2, 3)))
    ]
    traits = RUNTIMES[data.draw(st.sampled_from(sorted(RUNTIMES)))]
    one, several = (
        replace(experiment_from(SMALL_TEXT.replace(NODES, text)), traits=traits, precision="fp32")
        for text in (
            "\n".join(f"    - {{{key}{entry}}}" for entry in entries) for key in ("host: big, ", "")
        )
    )
    near = data.draw(cases(st.just(one)))
    assert near.time_s <= replace(near, experiment=several).time_s * (1 + CLOSE)


@given(
    shares=st.lists(
        st.lists(st.booleans(), min_size=7, max_size=7).map(
            lambda cuts: tuple(
                np.diff([0, *(i + 1 for i, cut in enumerate(cuts) if cut), 8]).tolist()
            )
        ),
        min_size=1,
        max_size=4,
    )
)
def test_parts_hold_the_same_samples_in_every_stage(shares: list[tuple[int, ...]]) -> None:
    parts = common_parts(shares)
    held = {
        tuple(np.bincount(own, weights=row).tolist())
        for own, row in zip(parts, shares, strict=True)
    }
    assert len(held) == 1
