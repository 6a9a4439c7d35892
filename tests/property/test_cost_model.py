from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE, Device
from amp_ray.cost.estimate import Breakdown, Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from support.experiments import small_experiment
from support.strategies import RECOMPUTE

SMALL = small_experiment()
SLOTS = 2
CLOSE = 1e-9

DEVICES = ("T4", "V100-16", "A100-40")
RUNTIME_NAMES = tuple(RUNTIMES)

links = st.builds(
    Link,
    bandwidth_bytes_per_s=st.floats(1e8, 1e11),
    latency_s=st.floats(0, 1e-4, allow_subnormal=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy and its experiment."""

    experiment: Experiment
    strategy: Strategy

    def _repr_pretty_(self, printer: RepresentationPrinter, _cycle: bool) -> None:  # noqa: FBT001
        given, plan = self.experiment, self.strategy
        parallel = f"tp {plan.tp}, dp {plan.dp}, bounds {plan.bounds}, recompute {plan.recompute}"
        batch = f"micro-batch {plan.micro_batch_size} x {plan.num_micro_batches}"
        train = f"{given.precision}, {given.optimizer}, ZeRO {self.strategy.zero}"
        hosts = [(node.device.name, node.intra, node.inter) for node in given.cluster.nodes]
        printer.text(f"<{given.traits.name}: {parallel}, {batch}, {train}, {hosts}>")

    def estimate(self) -> Estimate:
        return CostModel(experiment=self.experiment).estimate(self.strategy)

    def on(self, cluster: Cluster) -> "Case":
        return replace(self, experiment=replace(self.experiment, cluster=cluster))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    device = CATALOGUE[draw(st.sampled_from(DEVICES))]
    return Node(name="", device=device, num_slots=SLOTS, intra=draw(links), inter=draw(links))


def zeros(dp: int) -> st.SearchStrategy[Zero]:
    """Draw ZeRO options that shard over all ranks or groups, even if no runtime supports them."""
    groups = st.sampled_from(sorted({0, 1, dp}))
    plain = st.builds(Zero, stage=st.integers(1, 3), shard_ranks=groups)
    kept = st.builds(Zero, stage=st.just(3), shard_ranks=groups, keeps_weights=st.just(True))  # noqa: FBT003
    return st.one_of(st.just(NO_ZERO), plain, kept)


@st.composite
def cases(draw: st.DrawFn, degrees: Sequence[int] = (1, 2)) -> Case:
    """Draw a small GPT on up to four nodes of two devices each, with any runtime."""
    tp, dp = (draw(st.sampled_from(degrees)) for _ in range(2))
    pp = draw(st.sampled_from([1, 2]))
    num_nodes = -(-tp * dp * pp // SLOTS)
    cluster = Cluster(
        nodes=tuple(replace(draw(nodes()), name=str(index)) for index in range(num_nodes))
    )
    num_layers = SMALL.model.num_layers
    cuts = draw(st.sets(st.integers(1, num_layers - 1), min_size=pp - 1, max_size=pp - 1))
    recompute = draw(st.sampled_from(RECOMPUTE))
    candidate = Candidate(
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
        options=StageOptions(tp=tp, dp=dp, recompute=recompute, zero=draw(zeros(dp))),
        pp=pp,
        num_micro_batches=draw(st.integers(1, 8)),
    )
    experiment = replace(
        SMALL,
        cluster=cluster,
        traits=RUNTIMES[draw(st.sampled_from(RUNTIME_NAMES))],
        optimizer=draw(st.sampled_from(["adam", "sgd"])),
        precision=draw(st.sampled_from(["fp16", "fp32"])),
    )
    bounds = (0, *sorted(cuts), num_layers)
    return Case(experiment=experiment, strategy=Strategy.uniform(candidate, bounds))


def on_nodes(case: Case, change: Callable[[Node], Node]) -> Case:
    """Return a case with every node changed."""
    cluster = case.experiment.cluster
    return case.on(replace(cluster, nodes=tuple(change(node) for node in cluster.nodes)))


def on_devices(case: Case, change: Callable[[Device], Device]) -> Case:
    """Return a case with every device changed."""
    return on_nodes(case, lambda node: replace(node, device=change(node.device)))


def sped_up(device: Device, factor: float, rates: Collection[str]) -> Device:
    """Return a device with some of its rates multiplied by ``factor``."""
    faster: dict[str, Any] = {
        name: rate * factor for name in rates if (rate := getattr(device, name)) is not None
    }
    return replace(device, **faster)


def scaled(link: Link, factor: float) -> Link:
    """Return a link that is faster in every respect."""
    return Link(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        latency_s=link.latency_s / factor,
    )


RATES = ("fp32_flops", "fp16_flops", "memory_bytes_per_s")
DELAYS = (
    "kernel_gap_s",
    "host_s_per_kernel",
    "host_s_per_micro_batch",
    "host_s_per_iteration",
    "collective_start_s",
)
SMALL_SHARE = 0.2
"""Share of a device's memory that the context and this model need, approximately."""


@given(cases())
def test_breakdown_adds_up_and_has_no_negative_part(case: Case) -> None:
    estimate = case.estimate()
    assert estimate.breakdown is not None
    parts = [getattr(estimate.breakdown, part.name) for part in fields(Breakdown)]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(estimate.iteration_time_s, rel=CLOSE)


def without_measured_attention(device: Device) -> Device:
    """Return a device by another name where the catalogue's name has a rate of its own."""
    is_measured = device.attention_flops(64, native=True) is not None
    return replace(device, name=f"{device.name} elsewhere") if is_measured else device


@given(cases(), st.floats(0.1, 10))
def test_scaling_every_rate_and_delay_scales_the_time(case: Case, factor: float) -> None:
    case = on_devices(case, without_measured_attention)
    faster = on_devices(case, lambda device: sped_up(device, factor, RATES))
    faster = on_nodes(
        faster,
        lambda node: replace(
            node, intra=scaled(node.intra, factor), inter=scaled(node.inter, factor)
        ),
    )
    constants, traits = case.experiment.constants, case.experiment.traits
    delays = {name: getattr(constants, name) / factor for name in DELAYS}
    experiment = replace(
        faster.experiment,
        constants=replace(constants, **delays),
        traits=replace(
            traits,
            synchronisation_s=traits.synchronisation_s / factor,
            piped_collective_s=traits.piped_collective_s / factor,
            gather_slice_s=traits.gather_slice_s / factor,
        ),
    )
    after = replace(case, experiment=experiment).estimate().iteration_time_s
    assert after == pytest.approx(case.estimate().iteration_time_s / factor, rel=1e-6)


@given(cases(), st.sampled_from(RATES), st.floats(1, 10))
def test_a_faster_device_never_makes_an_iteration_longer(
    case: Case, rate: str, factor: float
) -> None:
    faster = on_devices(case, lambda device: sped_up(device, factor, (rate,)))
    before, after = case.estimate(), faster.estimate()
    # Shorter passes hide less of the gradients' sums: times that differ by rounding alone
    assert after.iteration_time_s <= before.iteration_time_s * (1 + 10 * CLOSE)
    assert after.peak_memory_bytes == before.peak_memory_bytes


def limited(case: Case, share: float) -> Estimate:
    """Return the estimate with all boards at a share of their power."""
    return on_devices(
        case,
        lambda device: replace(device, power_limit_w=share * (device.board_power_w or 0.0)),
    ).estimate()


@given(cases(), st.floats(0.2, 1), st.floats(0.2, 1))
def test_less_power_never_makes_an_iteration_shorter(case: Case, one: float, other: float) -> None:
    low, high = (limited(case, share) for share in sorted((one, other)))
    assert low.iteration_time_s >= high.iteration_time_s * (1 - CLOSE)
    assert high.iteration_time_s >= case.estimate().iteration_time_s * (1 - CLOSE)
    assert limited(case, 1.0) == case.estimate()


@given(cases(), st.floats(1, 100), st.floats(1, 100))
def test_faster_links_never_make_an_iteration_longer(
    case: Case, inside: float, between: float
) -> None:
    faster = on_nodes(
        case,
        lambda node: replace(
            node, intra=scaled(node.intra, inside), inter=scaled(node.inter, between)
        ),
    )
    before, after = case.estimate(), faster.estimate()
    assert after.iteration_time_s <= before.iteration_time_s * (1 + CLOSE)


@given(cases(), st.floats(1, 10))
def test_more_memory_never_makes_a_strategy_less_likely_to_run(case: Case, factor: float) -> None:
    def sized(share: float) -> Estimate:
        """Return the estimate on devices with only a share of their memory."""
        return on_devices(
            case,
            lambda device: replace(device, memory_bytes=int(device.memory_bytes * share)),
        ).estimate()

    before, after = sized(SMALL_SHARE), sized(SMALL_SHARE * factor)
    assert after.iteration_time_s == before.iteration_time_s
    assert after.failure_probability <= before.failure_probability
    assert after.feasible >= before.feasible


@given(cases(degrees=[2]))  # every tensor-parallel group fills a node
def test_equal_replicas_take_what_one_takes_and_the_sync(case: Case) -> None:
    first = case.experiment.cluster.nodes[0]
    equal = on_nodes(case, lambda node: replace(node, device=first.device, intra=first.intra))
    strategy = equal.strategy
    candidate = Candidate(
        micro_batch_size=strategy.micro_batch_size,
        options=StageOptions(tp=2, dp=1, recompute=strategy.stages[0].options.recompute),
        pp=strategy.pp,
        num_micro_batches=strategy.num_micro_batches,
    )
    placement = tuple(strategy.devices(stage)[i] for stage in range(strategy.pp) for i in (0, 1))
    alone = Strategy.uniform(candidate, strategy.bounds, placement)
    wide = Link(bandwidth_bytes_per_s=1e15, latency_s=0.0)  # so that sharing it costs nothing
    equal = on_nodes(equal, lambda node: replace(node, inter=wide))
    both, one = equal.estimate().breakdown, replace(equal, strategy=alone).estimate().breakdown
    assert both is not None
    assert one is not None
    for part in ("compute_s", "tensor_parallel_s", "bubble_s", "pipeline_p2p_s"):
        assert getattr(both, part) == pytest.approx(getattr(one, part), rel=1e-6, abs=1e-9)


@given(cases())
def test_order_of_nodes_does_not_matter_where_all_hold_the_same(case: Case) -> None:
    assume(case.strategy.pp == 1)
    turned = case.on(replace(case.experiment.cluster, nodes=case.experiment.cluster.nodes[::-1]))
    before, after = case.estimate(), turned.estimate()
    assert after.iteration_time_s == pytest.approx(before.iteration_time_s, rel=CLOSE)
    assert after.peak_memory_bytes == before.peak_memory_bytes
    assert after.feasible == before.feasible


@given(cases())
def test_larger_micro_batches_need_no_less_memory(case: Case) -> None:
    larger = replace(case.strategy, micro_batch_size=2 * case.strategy.micro_batch_size)
    before, after = case.estimate(), replace(case, strategy=larger).estimate()
    pairs = zip(before.peak_memory_bytes, after.peak_memory_bytes, strict=True)
    # As much where the optimizer step needs more than the activations
    assert all(large >= small for small, large in pairs)
    assert after.iteration_time_s >= before.iteration_time_s * (1 - CLOSE)


@given(cases(), st.data())
def test_a_stage_within_another_one_needs_less_memory(case: Case, data: st.DataObject) -> None:
    # only blocks, since all boundaries between blocks are alike
    memory = CostModel(experiment=case.experiment).memory(replace(candidate(case), pp=3))
    blocks = case.experiment.model.indices("block")
    first, last = blocks[0] + 1, blocks[-1]
    start = data.draw(st.integers(first, last - 2))
    end = data.draw(st.integers(start + 2, last))
    assert memory.peak(1, start, end) < memory.peak(1, start - 1, end)


def candidate(case: Case) -> Candidate:
    """Return the candidate of the strategy."""
    strategy = case.strategy
    tp, dp = strategy.tp, strategy.dp
    assert tp is not None
    assert dp is not None
    return Candidate(
        micro_batch_size=strategy.micro_batch_size,
        options=StageOptions(tp=tp, dp=dp, recompute=strategy.stages[0].options.recompute),
        pp=strategy.pp,
        num_micro_batches=strategy.num_micro_batches,
    )


@given(cases(), st.data())
def test_earliest_starts_agree_with_the_peaks(case: Case, data: st.DataObject) -> None:
    plan = candidate(case)
    whole = replace(plan.options, recompute=plan.options.recompute.whole)
    memory = CostModel(experiment=case.experiment).memory(replace(plan, options=whole))
    num_layers = case.experiment.model.num_layers
    table = {
        (stage, start, end): memory.peak(stage, start, end)
        for stage in range(plan.pp)
        for end in range(1, num_layers + 1)
        for start in range(end)
    }
    limits = [data.draw(st.sampled_from(sorted(table.values()))) for _ in range(plan.pp)]
    from_first = data.draw(st.booleans())
    found = memory.earliest_starts(np.array(limits), from_first=from_first)
    for stage, limit in enumerate(limits):
        for end in range(1, num_layers + 1):
            starts = range(1 if from_first and not stage else end)
            fits = [table[stage, start, end] <= limit for start in starts]
            wanted = end
            if any(fits):
                last = max(start for start in starts if fits[start])
                wanted = max((s + 1 for s in range(last) if not fits[s]), default=0)
            assert found[stage, end] == wanted


@given(cases())
def test_stage_times_are_sums_of_their_layers(case: Case) -> None:
    costs = CostModel(experiment=case.experiment).costs(candidate(case))
    times = costs.times.at(case.strategy.bounds)
    layers, plain = np.diff(costs.times.tables, axis=2), np.diff(costs.times.plain, axis=2)
    for stage, (first, end) in enumerate(pairwise(case.strategy.bounds)):
        again = _computed_again(case.experiment.model, case.strategy.stages[stage])
        for replica, kind in enumerate(costs.times.kind.reshape(case.strategy.pp, -1)[stage]):
            wanted = np.where(again, layers[kind, :, first:end], plain[kind, :, first:end]).sum(1)
            np.testing.assert_allclose(times[:, stage, replica], wanted, rtol=1e-9, atol=1e-15)


def _computed_again(model: Model, stage: Stage) -> list[bool]:
    """Return for every layer of a stage whether it belongs to the stage's recomputed blocks."""
    num_left = stage.options.recompute.layers
    recomputed = []
    for layer in model.layers[stage.first_layer : stage.end_layer]:
        recomputed.append(num_left is None or num_left > 0)
        if num_left is not None and layer.kind == "block":
            num_left -= 1
    return recomputed


@given(cases())
def test_partition_objective_never_flatters_a_stage(case: Case) -> None:
    costs = CostModel(experiment=case.experiment).costs(candidate(case))
    rows, of_stage = costs.times.rows()
    bounds = case.strategy.bounds
    exact = costs.times.at(bounds)[:2].sum(axis=0).max(axis=1)
    for stage, (first, end) in enumerate(pairwise(bounds)):
        upper = rows[of_stage[stage], end] - rows[of_stage[stage], first]
        assert upper >= exact[stage] * (1 - CLOSE)


@given(st.sampled_from([part.name for part in fields(Constants)]), cases(), st.floats(1.01, 3))
def test_no_constant_makes_an_iteration_negative_or_endless(
    name: str, case: Case, factor: float
) -> None:
    constants = case.experiment.constants
    moved = replace(constants, **{name: getattr(constants, name) * factor})
    estimate = replace(case, experiment=replace(case.experiment, constants=moved)).estimate()
    assert 0 < estimate.iteration_time_s < np.inf
    assert 0 <= estimate.failure_probability <= 1
