"""Context parallelism: ranks that divide the tokens of every sequence."""

import json
from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import find_device
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import (
    FUSED_BACKWARD_PRODUCTS,
    FUSED_BACKWARD_RATE,
    Rank,
    attention_rate,
)
from amp_ray.cost.samples import ContextGroup, context_exchange_s
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import parse_strategies, strategy_from_json, strategy_to_json
from amp_ray.runtimes.releases import ContextExchange
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy
from support.experiments import experiment_from, llama_8b

LENGTH = 131_072
KINDS: tuple[ContextExchange, ...] = ("ring", "all-gather", "all-to-all", "both")

TEXT = f"""
name: long
{llama_8b(LENGTH)}
cluster:
  nodes:
    - {{count: 8, device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}}
precision: bf16
zero_stage: 1
runtime: megatron-core
global_batch_size: 32
"""


def given(exchange: ContextExchange = "ring", text: str = TEXT, *, max_cp: int = 1) -> Experiment:
    plain = experiment_from(text)
    return replace(
        plain,
        traits=replace(plain.traits, context_parallel=exchange),
        limits=replace(plain.limits, max_cp=max_cp),
    )


def strategy(*, tp: int, cp: int, dp: int, pp: int = 1) -> Strategy:
    candidate = Candidate(
        micro_batch_size=1,
        options=replace(given().stage_options(tp, dp, cp=cp), zero=given().zero(pp)),
        pp=pp,
        num_micro_batches=32 // dp,
    )
    return Strategy.uniform(candidate, tuple(35 * stage // pp for stage in range(pp + 1)))


def parts(found: Estimate) -> Breakdown:
    assert found.breakdown is not None
    return found.breakdown


def ends_apart_s(model: CostModel, strategy: Strategy) -> float:
    """Return by how much all passes of attention are longer than their work, on average."""
    (stage,) = strategy.stages
    device = model.experiment.cluster.device_types[0]
    rank = Rank.of(device, stage.options, 1, "bf16")
    shorter = model.samples_of(stage.options).experiment.model
    half_s = sum(
        op.block_flops * device.num_multiprocessors / attention_rate(op, rank, Constants()) / 2
        for layer in shorter.layers
        for op in layer.elementwise
        if op.block_flops
    )
    return strategy.num_micro_batches * half_s * (1 + FUSED_BACKWARD_PRODUCTS / FUSED_BACKWARD_RATE)


def test_ranks_of_a_sequence_share_its_work_and_memory() -> None:
    model = CostModel(experiment=given())
    alone, shared = (
        model.with_columns(model.estimate(strategy(tp=4, cp=cp, dp=16 // cp))) for cp in (1, 8)
    )
    # As much work for all: half of the samples at a time, each by eight ranks. Blocks of attention
    # end apart in every micro-batch, of which each rank has eight times as many.
    works_s = [
        parts(plan).compute_s - ends_apart_s(model, plan.strategy) for plan in (alone, shared)
    ]
    assert works_s[1] == pytest.approx(works_s[0], rel=0.03)
    assert not alone.feasible
    assert shared.feasible
    assert shared.strategy == strategy(tp=4, cp=8, dp=2)
    assert shared.tokens_per_s == pytest.approx(32 * LENGTH / shared.iteration_time_s)
    assert shared.mfu is not None
    assert alone.mfu is not None
    assert shared.mfu / alone.mfu == pytest.approx(alone.iteration_time_s / shared.iteration_time_s)
    for row, peak in zip(
        model.memory_parts(shared.strategy), shared.peak_memory_bytes, strict=True
    ):
        assert sum(row.values()) == pytest.approx(peak)


def test_gradients_are_added_up_over_dp_and_cp() -> None:
    model = CostModel(experiment=given())
    one, other = (model.estimate(strategy(tp=4, cp=cp, dp=16 // cp)) for cp in (4, 8))
    assert parts(one).gradient_sync_s == parts(other).gradient_sync_s
    assert parts(one).optimizer_s == parts(other).optimizer_s


def test_a_ring_hides_behind_attention_and_a_gather_does_not() -> None:
    ring, gathered = (
        CostModel(experiment=given(exchange)).estimate(strategy(tp=4, cp=8, dp=2))
        for exchange in ("ring", "all-gather")
    )
    assert parts(ring).tensor_parallel_s < parts(gathered).tensor_parallel_s
    # Without a wait the ring costs what its last gradients take to come home.
    assert (
        parts(ring).tensor_parallel_s
        < 1.5
        * parts(
            CostModel(experiment=given()).estimate(strategy(tp=4, cp=1, dp=16))
        ).tensor_parallel_s
    )


@pytest.mark.parametrize("exchange", KINDS)
def test_all_exchanges_are_alike_where_nothing_is_divided(exchange: ContextExchange) -> None:
    ring, other = (
        CostModel(experiment=given(kind)).estimate(strategy(tp=4, cp=1, dp=16))
        for kind in ("ring", exchange)
    )
    assert other.iteration_time_s == ring.iteration_time_s
    assert other.peak_memory_bytes == ring.peak_memory_bytes


def test_four_all_to_alls_of_each_pass_are_seen_whole() -> None:
    """Queries and results have 4,096 elements for each token, keys and values 1,024."""
    layer = CostModel(experiment=given("all-to-all")).samples(8).experiment.model.layers[1]
    rank = Rank.of(find_device("H100"), StageOptions(tp=1, dp=1), 1, "bf16")
    group = ContextGroup(ring_ranks=1, ring=NO_RING, exchange=Path(bytes_per_s=1e9, step_s=0.0))
    constants, traits = Constants(collective_start_s=0.0), given().traits
    forward_s, backward_s = context_exchange_s(layer, rank, group, traits, constants)
    assert forward_s == pytest.approx(2 * LENGTH / 8 * (4096 + 1024 + 1024 + 4096) / 1e9)
    assert backward_s == forward_s


def test_all_to_alls_need_no_buffers_and_no_sums_but_keep_the_result_twice() -> None:
    ring, divided = (
        CostModel(experiment=given(exchange)).samples(8).experiment.model.layers[1]
        for exchange in ("ring", "all-to-all")
    )
    tokens, (of_ring, of_heads) = (
        LENGTH // 8,
        ({op.name: op for op in layer.elementwise}["attention"] for layer in (ring, divided)),
    )
    assert of_heads.flops == of_ring.flops
    assert of_heads.saved_elements == of_ring.saved_elements
    assert (of_heads.buffer_elements, of_heads.context_elements, of_heads.num_kernels) == (0, 0, 1)
    # A rank reads the keys and values of its heads once, not those of half of the others
    read = 2 * tokens * 1024
    assert of_heads.forward_elements == read + 2 * tokens * 4096
    assert of_ring.forward_elements == 4.5 * read + 2 * tokens * 4096 + 3 * 7 * tokens * 4096
    saved = (layer.saved_bytes(tp=1, bytes_per_element=2) for layer in (divided, ring))
    assert next(saved) - next(saved) == 2 * tokens * 4096
    cores = (layer.core_saved_bytes(tp=1, bytes_per_element=2) for layer in (divided, ring))
    assert next(cores) - next(cores) == 2 * tokens * 4096


def test_neighbours_divide_heads_and_nodes_form_rings() -> None:
    """Eight heads of keys and values, eight devices of a node."""
    both, whole = given("both"), given("all-to-all")
    degrees = [(1, 16), (1, 4), (2, 16), (4, 8), (8, 4), (1, 24)]
    assert [both.head_ranks(*each) for each in degrees] == [8, 4, 4, 2, 1, 8]
    assert [whole.head_ranks(*each) for each in degrees] == [cp for _, cp in degrees]
    assert [given().head_ranks(*each) for each in degrees] == [1] * len(degrees)
    assert parts(CostModel(experiment=both).estimate(strategy(tp=8, cp=4, dp=2))) == parts(
        CostModel(experiment=given()).estimate(strategy(tp=8, cp=4, dp=2))
    )


def test_a_slow_network_costs_one_step_of_a_ring_between_two_nodes() -> None:
    """One ring of 16 crosses in 15 steps, eight rings of 2 in one; all-to-alls send all across."""
    talk_s = {
        exchange: parts(
            CostModel(experiment=given(exchange, TEXT.replace("3200", "20"))).estimate(
                strategy(tp=1, cp=16, dp=4)
            )
        ).tensor_parallel_s
        for exchange in KINDS
    }
    assert talk_s["both"] < talk_s["ring"] < talk_s["all-gather"]
    assert talk_s["both"] < talk_s["all-to-all"]


def test_heads_that_ranks_cannot_divide_are_refused_by_name() -> None:
    experiment = given("all-to-all", max_cp=16)
    planner = AmpRayPlanner(experiment=experiment)
    for tp, cp in ((1, 8), (4, 2)):
        assert isinstance(planner.plan(candidate_of(experiment, tp, cp)), Estimate)
    for tp, cp in ((4, 4), (1, 16)):
        refused = planner.plan(candidate_of(experiment, tp, cp))
        assert isinstance(refused, Infeasible)
        assert refused.reason.kind == "tp x cp does not divide the key/value heads"
        words = f"tp {tp} x cp {cp} must divide the 8 heads of keys and values"
        assert words in refused.reason.detail


def candidate_of(experiment: Experiment, tp: int, cp: int) -> Candidate:
    options = replace(experiment.stage_options(tp, 64 // tp // cp, cp=cp), zero=experiment.zero(1))
    return Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=32 // options.dp)


@pytest.mark.parametrize("exchange", ["all-to-all", "both"])
def test_bounds_of_divided_heads_hold(exchange: ContextExchange) -> None:
    experiment = given(exchange, TEXT.replace(str(LENGTH), "16384"), max_cp=16)
    planner = AmpRayPlanner(experiment=experiment)
    for tp, cp in ((4, 2), (2, 4), (1, 8)):
        estimate = planner.cost_model.estimate(strategy(tp=tp, cp=cp, dp=64 // tp // cp))
        least_s = planner.chooser.least_s(strategy_candidate(estimate), 1e9)
        assert 0.9 * estimate.iteration_time_s < least_s <= estimate.iteration_time_s


def test_gathered_keys_and_values_take_memory() -> None:
    ring, gathered = (
        CostModel(experiment=given(exchange)).estimate(strategy(tp=1, cp=32, dp=1, pp=2))
        for exchange in ("ring", "all-gather")
    )
    assert gathered.peak_memory_bytes[0] > ring.peak_memory_bytes[0]


def test_a_ring_over_a_slow_network_is_seen() -> None:
    fast, slow = (
        CostModel(experiment=given(text=TEXT.replace("3200", rate))).estimate(
            strategy(tp=8, cp=8, dp=1)
        )
        for rate in ("3200", "20")
    )
    assert parts(slow).tensor_parallel_s > 2 * parts(fast).tensor_parallel_s
    assert parts(slow).compute_s == pytest.approx(parts(fast).compute_s)


def test_full_recompute_exchanges_again() -> None:
    slow = given(text=TEXT.replace("3200", "20") + "recompute: full\n")
    again = CostModel(experiment=slow).estimate(replace_recompute(strategy(tp=8, cp=8, dp=1), slow))
    plain = CostModel(experiment=slow).estimate(strategy(tp=8, cp=8, dp=1))
    assert parts(again).tensor_parallel_s > parts(plain).tensor_parallel_s


def replace_recompute(plan: Strategy, experiment: Experiment) -> Strategy:
    stages = tuple(
        replace(stage, options=replace(stage.options, recompute=experiment.recompute))
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def test_a_search_finds_what_practice_runs() -> None:
    """128k tokens of Llama 3 8B on 64 H100: tp 4, cp 8 as NVIDIA's recipes have it, or near it."""
    experiment = given(max_cp=16)
    planner = AmpRayPlanner(experiment=experiment)
    wanted = [own for own in uniform_candidates(experiment) if own.options.tp * own.pp in {4, 8}]
    found = [planner.plan(own) for own in wanted]
    feasible = [own for own in found if isinstance(own, Estimate) and own.feasible]
    best = min(feasible, key=lambda own: own.iteration_time_s)
    assert all(own.strategy.stages[0].options.cp > 1 for own in feasible)
    known = planner.plan(
        Candidate(
            micro_batch_size=1,
            options=replace(experiment.stage_options(4, 2, cp=8), zero=experiment.zero(1)),
            pp=1,
            num_micro_batches=16,
        )
    )
    assert isinstance(known, Estimate)
    assert known.feasible
    assert known.iteration_time_s < 1.1 * best.iteration_time_s
    assert planner.chooser.least_s(strategy_candidate(best), 1e9) <= best.iteration_time_s


@pytest.mark.parametrize(("tp", "cp"), [(4, 4), (4, 8), (8, 8)])
def test_the_bound_of_a_single_stage_counts_the_path_of_its_rings(tp: int, cp: int) -> None:
    experiment = given(max_cp=16)
    planner = AmpRayPlanner(experiment=experiment)
    estimate = planner.cost_model.estimate(strategy(tp=tp, cp=cp, dp=64 // tp // cp))
    least_s = planner.chooser.least_s(strategy_candidate(estimate), 1e9)
    assert 0.997 * estimate.iteration_time_s < least_s <= estimate.iteration_time_s


def strategy_candidate(found: Estimate) -> Candidate:
    plan = found.strategy
    assert plan.options is not None
    return Candidate(
        micro_batch_size=plan.micro_batch_size,
        options=plan.options,
        pp=plan.pp,
        num_micro_batches=plan.num_micro_batches,
    )


def test_json_and_csv_tell_it() -> None:
    experiment = given()
    plan = strategy(tp=2, cp=4, dp=4, pp=2)
    record = json.loads(json.dumps(strategy_to_json(plan, experiment.cluster)))
    assert record["cp"] == 4
    assert strategy_from_json(record, experiment.cluster) == plan
    text = "tp,cp,pp,dp,micro_batch_size,bounds\n2,4,2,4,1,0 17 35\n"
    (found,) = parse_strategies(text, file="s.csv", experiment=experiment)
    assert found.strategy == plan


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2,3,1,8,1", r"tp 2 x cp 3 x pp 1 x dp 8 = 48 devices; the cluster has 64"),
        ("1,64,1,1,1", r"cp: found 64; 2 x cp must divide the tokens of a sequence, 1088"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(row: str, words: str) -> None:
    experiment = given(text=TEXT.replace(str(LENGTH), "1088"))
    text = f"tp,cp,pp,dp,micro_batch_size\n{row}\n"
    with pytest.raises(InputError, match=words):
        parse_strategies(text, file="s.csv", experiment=experiment)


def test_runtimes_without_it_are_named() -> None:
    with pytest.raises(
        InputError,
        match=r"'deepspeed' has no context parallelism, found cp 4; .*: torch",
    ):
        experiment_from(TEXT.replace("megatron-core", "deepspeed") + "search: {max_cp: 4}\n")
    model = CostModel(experiment=given("none"))
    estimate = model.with_columns(model.estimate(strategy(tp=4, cp=8, dp=2)))
    assert not estimate.launchable
    assert any("has no context parallelism" in warning for warning in estimate.warnings)


def test_models_without_one_causal_sequence_are_refused() -> None:
    pictures = given(text=TEXT.replace(str(LENGTH), "1090"))
    with pytest.raises(InputError, match="whose length 2 x cp divides"):
        CostModel(experiment=pictures).samples(4)


@pytest.mark.parametrize("cp", [0, -1])
def test_degrees_start_at_one(cp: int) -> None:
    with pytest.raises(ValueError, match="cp starts at 1"):
        StageOptions(tp=1, dp=1, cp=cp)
