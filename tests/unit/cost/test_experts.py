from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from amp_ray.cost.collective import NO_RING, Path, exchange_s, start_s
from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.cost.memory import LayerMemory
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, device_phases
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.weights import Weights
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.operator import Elementwise
from amp_ray.runtimes.releases import HOST_WORK, DispatcherName
from amp_ray.runtimes.traits import RECOMPUTED, RUNTIMES
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import Recompute, RecomputeKind
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.units import BYTES_PER_ELEMENT
from support.checked import grid_of, required
from support.experiments import experiment_from, small_experiment

GIGABIT = 1e9 / 8

MOE = """\
name: experts
model: {family: llama, num_layers: 4, hidden_size: 512, num_heads: 8, sequence_length: 256,
        vocab_size: 1024, num_experts: 8, experts_per_token: 2, expert_feed_forward_size: 768,
        shared_feed_forward_size: 256, first_dense_layers: 1}
cluster:
  nodes:
    - {count: 2, device: A100-80, slots: 4, intra_gbit_per_s: 2000, inter_gbit_per_s: 200}
precision: bf16
runtime: megatron-lm-2022
traits: {fused_attention: true, expert_parallel: true}
global_batch_size: 16
"""
EXPERIMENT = experiment_from(MOE)
LAYERS = EXPERIMENT.model.num_layers
EXPERT_PARAMETERS = 3 * 8 * 3 * 512 * 768
"""Three blocks of eight experts with three matrices each."""


def strategy(options: StageOptions, *, pp: int = 1, size: int = 1) -> Strategy:
    batches = 16 // (options.dp * size)
    candidate = Candidate(micro_batch_size=size, options=options, pp=pp, num_micro_batches=batches)
    bounds = (0, LAYERS) if pp == 1 else (0, 3, LAYERS)
    return Strategy.uniform(candidate, bounds)


def estimate(options: StageOptions, experiment: Experiment = EXPERIMENT) -> Estimate:
    return CostModel(experiment=experiment).estimate(strategy(options))


def test_experts_are_divided_by_the_ranks_that_share_them() -> None:
    model = EXPERIMENT.model
    whole = Weights(model=model, tp=1)
    shared = Weights(model=model, tp=1, expert_ranks=4)
    all_of_them, some = (each.expert_prefix[-1] for each in (whole, shared))
    assert (all_of_them, some) == (EXPERT_PARAMETERS, EXPERT_PARAMETERS / 4)
    (total,), (held,) = (each.of_stages((0, LAYERS)) for each in (whole, shared))
    assert total == model.num_parameters
    assert total - held == EXPERT_PARAMETERS * 3 / 4


@pytest.mark.parametrize(
    "sizes", [(1, 8, 0), (2, 4, 1), (2, 8, 1), (2, 2, 2), (4, 2, 4), (4, 2, 2)]
)
def test_ranks_together_have_every_expert_as_often_as_replicas(sizes: tuple[int, int, int]) -> None:
    tp, ep, etp = sizes
    options = StageOptions(tp=tp, dp=8 // tp, ep=ep, etp=etp)
    tables = CostModel(experiment=EXPERIMENT).time_tables
    layers = tables.rank_model(tp, ep, options.expert_tp).layers
    on_a_rank = sum(layer.expert_parameters for layer in layers) / tp
    assert on_a_rank * 8 == EXPERT_PARAMETERS * options.expert_dp


@pytest.mark.parametrize("sizes", [(1, 8, 0), (2, 4, 1), (2, 2, 2), (4, 4, 2)])
def test_spread_experts_do_the_same_work(sizes: tuple[int, int, int]) -> None:
    tp, ep, etp = sizes
    even = replace(EXPERIMENT.constants, expert_imbalance=1.0)
    tables = CostModel(experiment=replace(EXPERIMENT, constants=even)).time_tables
    layers = tables.rank_model(tp, ep, etp or tp).layers
    work = [sum(gemm.flops for gemm in layer.gemms) for layer in layers]
    assert work == [sum(gemm.flops for gemm in layer.gemms) for layer in EXPERIMENT.model.layers]


def test_gpt_blocks_may_have_experts_too() -> None:
    text = MOE.replace("family: llama", "family: gpt2, feed_forward_size: 2048")
    model = experiment_from(text).model
    assert sum(layer.expert_parameters for layer in model.layers) == 3 * 8 * 2 * 512 * 768
    assert [layer.name for layer in model.layers[1:5]] == ["block", *["moe-block"] * 3]


def test_biases_of_experts_are_added_in_single_precision() -> None:
    """Two ranks share eight experts; each token goes through two of them, 512 elements wide."""
    model = experiment_from(
        MOE.replace("num_experts: 8", "expert_bias: true, num_experts: 8")
    ).model
    experts = required(model.layers[-3].experts)
    names = [op.name for op in experts.spread(tp=1, ep=2, etp=1, load=1.0)]
    assert names[-3:] == ["experts-out", "experts-bias", "combine"]
    bias = experts.spread(tp=1, ep=2, etp=1, load=1.0)[-2]
    assert isinstance(bias, Elementwise)
    elements = 256 * 2 * 512
    assert bias.forward_elements == elements * (4 + 10 + 8 + 6) / 2
    assert bias.backward_elements == elements * (6 + 6 + 12 + 12 + 4) / 2
    assert sum(bias.addressed) == elements  # the bias is repeated for each row
    assert bias.num_kernels == 4 * 2 + 2  # product and sum for each of four experts
    (shared,) = (op for op in experts.spread(tp=2, ep=2, etp=2, load=1.0) if op.name == bias.name)
    assert isinstance(shared, Elementwise)
    assert shared.forward_elements == bias.forward_elements


def test_clamps_and_scaled_rotation_are_kernels_of_their_own() -> None:
    """A rank's 512 copies of tokens go through experts of the width that the model states."""
    plain, changed = (
        experiment_from(MOE.replace("num_experts: 8", f"{figures}num_experts: 8")).model.layers[-3]
        for figures in ("", "clamped_activation: true, scaled_rotation: true, ")
    )
    assert changed.experts is not None
    inner = 2 * 256 * changed.experts.feed_forward
    (rotation,) = (op for op in plain.elementwise if op.name == "rotary")
    rotated = rotation.forward_elements / 2
    (clamps,) = (
        set(changed.elementwise)
        - set(plain.elementwise)
        - {op for op in changed.elementwise if op.name == "rotary"}
    )
    (turned,) = (op for op in changed.elementwise if op.name == "rotary")
    expected = (
        (clamps, inner, (8, 15, 3), (2, 5)),
        (turned, rotated, (12, 14, 12), (4.7, 4.7)),
    )
    for op, elements, (forward, backward, kernels), addressed in expected:
        assert op.addressed == tuple(each * elements for each in addressed)
        assert op.forward_elements == forward * elements
        assert op.backward_elements == backward * elements
        assert op.num_kernels == kernels
    assert clamps.name == "experts-clamps"


def test_parts_of_a_block_are_recomputed_in_every_backward_pass() -> None:
    """Two norms and an activation again, unless the whole block is."""
    traits = replace(EXPERIMENT.traits, recompute_modules=("layernorm", "moe_act"))
    options, ring = StageOptions(tp=1, dp=8), NO_RING
    names = ("norm-1", "norm-2", "experts-activation")
    kinds: tuple[RecomputeKind, ...] = ("none", "full")
    for kind in kinds:
        chosen = replace(options, recompute=Recompute(kind=kind))
        plain, again = (
            CostModel(experiment=replace(EXPERIMENT, traits=each)).time_tables
            for each in (EXPERIMENT.traits, traits)
        )
        before, after = (tables.table((0,), ring, chosen, 2)[0] for tables in (plain, again))
        rank = Rank.of(EXPERIMENT.cluster.device_types[0], chosen, 2, "bf16")
        parts = [op for op in EXPERIMENT.model.layers[-3].operators if op.name in names]
        added_s = device_phases(parts, rank, EXPERIMENT.constants).forward_s
        block = after[1, 4] - after[1, 3] - (before[1, 4] - before[1, 3])
        assert block == pytest.approx(added_s if kind == "none" else 0.0, abs=1e-12)


def test_what_is_recomputed_anyway_is_not_kept() -> None:
    """Copies of tokens: their clamped inputs, twice as wide, and the second product's input."""
    figures = "clamped_activation: true, num_experts: 8"
    given = experiment_from(MOE.replace("num_experts: 8", figures))
    layer = given.model.layers[-3]
    rank = Rank.of(given.cluster.device_types[0], StageOptions(tp=1, dp=8), 2, "bf16")
    kept = [
        LayerMemory(
            model=given.model,
            rank=rank,
            traits=replace(given.traits, recompute_modules=modules),
        ).kept_bytes(layer, "none")
        for modules in ((), ("moe_act",), ("layernorm",))
    ]
    tokens = 2 * 256
    assert kept[0] - kept[1] == 2 * tokens * 2 * 3 * 768
    streams = 3  # inputs of queries, keys and values, of the router, and of the shared expert
    assert kept[0] - kept[2] == 2 * tokens * streams * 512


def test_an_uneven_router_makes_the_busiest_rank_slower_and_fuller() -> None:
    found = []
    for imbalance in (1.0, 1.5):
        constants = replace(
            EXPERIMENT.constants, expert_imbalance=imbalance, host_s_per_kernel=1e-9
        )
        given = replace(EXPERIMENT, constants=constants)
        found.append(estimate(StageOptions(tp=1, dp=8, ep=4), given))
    assert found[0].iteration_time_s < found[1].iteration_time_s
    assert found[0].peak_memory_bytes < found[1].peak_memory_bytes


@pytest.mark.parametrize(
    ("link", "gbyte_per_s"),
    [("intra_gbit_per_s: 2000, ", 250), ("", 203)],
    ids=["stated", "of the board"],
)
def test_an_all_to_all_within_a_node_keeps_what_is_its_own(link: str, gbyte_per_s: int) -> None:
    """A rank sends three quarters of its bytes: at the stated rate, or as A100 was measured."""
    experiment = experiment_from(MOE.replace("intra_gbit_per_s: 2000, ", link))
    topology = CostModel(experiment=experiment).topology
    path = topology.exchange([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert path.bytes_per_s == pytest.approx(gbyte_per_s * 1e9 * 4 / 3)
    assert path.num_nodes == 1


def test_an_all_to_all_across_nodes_shares_the_interface() -> None:
    topology = CostModel(experiment=EXPERIMENT).topology
    path = topology.exchange([list(range(8))])
    rate = topology.best_inter_bytes_per_s
    assert path.bytes_per_s == pytest.approx(rate / 4 * 8 / 4)
    alone = topology.exchange([[0, 4]])
    assert alone.bytes_per_s == pytest.approx(rate * 2)


def _sent(groups: Sequence[Sequence[int]]) -> Counter[int]:
    """Count by brute force what leaves each node where each rank sends a byte to each other."""
    return Counter(a // 4 for group in groups for a in group for b in group if a // 4 != b // 4)


@pytest.mark.parametrize("groups", [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 4], [2, 3, 5]]])
def test_an_all_to_all_takes_what_leaves_the_busiest_node(groups: list[list[int]]) -> None:
    topology = CostModel(experiment=EXPERIMENT).topology
    path, size = topology.exchange(groups), len(groups[0])
    least_s = max(_sent(groups).values()) / topology.best_inter_bytes_per_s
    assert size / path.bytes_per_s == pytest.approx(least_s)


@pytest.mark.parametrize("copies", [2, 8])
def test_a_token_crosses_the_network_once_for_all_its_experts_of_a_node(copies: int) -> None:
    """Over two nodes hardly more than one copy of a token leaves its own; a rank gets one."""
    topology = CostModel(experiment=EXPERIMENT).topology
    every, once = (topology.exchange([list(range(8))], number) for number in (1, copies))
    assert once.bytes_per_s / every.bytes_per_s == pytest.approx(copies / 2 / (1 - 0.5**copies))
    every, once = (topology.exchange([[0, 1, 2, 3]], number) for number in (1, copies))
    ranks = 4 * (1 - 0.75**copies)
    assert once.bytes_per_s / every.bytes_per_s == pytest.approx(copies / ranks)


def test_tokens_go_to_their_experts_and_back_in_both_passes() -> None:
    model = CostModel(experiment=EXPERIMENT)
    options = StageOptions(tp=1, dp=8, ep=8)
    path = model.topology.exchange([list(range(8))])
    near, far = (
        model.time_tables.table((0,), model.topology.ring((0,), 1, {}), options, 2, met)[0]
        for met in (replace(path, bytes_per_s=float("inf"), step_s=0.0), path)
    )
    num_bytes = 2 * 256 * 2 * 512 * BYTES_PER_ELEMENT["bf16"]
    each_s = exchange_s(num_bytes, path, 0.0)
    assert far[0, -1] - near[0, -1] == pytest.approx(3 * 2 * each_s)
    assert far[1, -1] - near[1, -1] == pytest.approx(3 * 2 * each_s)


def moe_layer_s(
    launch_s: float, path: Path, *, dispatcher: DispatcherName = "nccl", overlaps: bool = False
) -> tuple[float, float]:
    """Return the seconds of both passes of a block with experts, which has 28 kernels."""
    traits = replace(EXPERIMENT.traits, overlaps_exchanges=overlaps, dispatcher=dispatcher)
    constants = replace(EXPERIMENT.constants, host_s_per_kernel=launch_s)
    model = CostModel(experiment=replace(EXPERIMENT, traits=traits, constants=constants))
    (kernels,) = {
        layer.num_kernels
        for layer in model.time_tables.rank_model(1, 8, 1).layers
        if layer.experts is not None
    }
    assert kernels == 28
    options = StageOptions(tp=1, dp=8, ep=8)
    table, _ = model.time_tables.table((0,), model.topology.ring((0,), 1, {}), options, 2, path)
    forward_s, backward_s = (table[row, 3] - table[row, 2] for row in (0, 1))
    return float(forward_s), float(backward_s)


def test_a_host_that_routes_launches_more_and_waits_for_half_of_the_tokens() -> None:
    """With a slow host: a dispatcher's work for 2 kernels, and one of two exchanges, not both."""
    path = CostModel(experiment=EXPERIMENT).topology.exchange([list(range(8))])
    num_bytes = 2 * 256 * 2 * 512 * BYTES_PER_ELEMENT["bf16"]
    exchange = exchange_s(num_bytes, path, start_s(EXPERIMENT.constants, EXPERIMENT.traits))
    names: tuple[DispatcherName, ...] = ("nccl", "alltoall", "deepep")
    plain, free, routed = (moe_layer_s(1e-3, path, dispatcher=name) for name in names)
    assert plain[0] == pytest.approx(28e-3 + 2 * exchange)
    launches = HOST_WORK["bf16"].dispatchers
    assert free[0] == pytest.approx((26 + launches["alltoall"][0]) * 1e-3)
    assert routed[0] == pytest.approx((26 + launches["deepep"][0]) * 1e-3 + exchange)
    fewer = 2 * (2 - launches["deepep"][1]) * 1e-3
    assert plain[1] - routed[1] == pytest.approx(2 * exchange + fewer)


def test_a_device_waits_for_the_launches_behind_the_wait_of_its_host() -> None:
    path = CostModel(experiment=EXPERIMENT).topology.exchange([list(range(8))])
    plain = moe_layer_s(1e-7, path)
    routed = moe_layer_s(1e-7, path, dispatcher="deepep")
    waiting = HOST_WORK["bf16"].dispatchers["deepep"][0] * 17 / 24
    assert routed[0] - plain[0] == pytest.approx(waiting * 1e-7)
    assert routed[1] == pytest.approx(plain[1])


def test_all_to_alls_beside_another_micro_batch_show_what_its_passes_do_not_hide() -> None:
    """Both passes of a layer take as long as the longer of work and exchanges, which slow it."""
    near = CostModel(experiment=EXPERIMENT).topology.exchange([[0, 1, 2, 3]])
    idle = replace(near, bytes_per_s=float("inf"), step_s=0.0, exchange=None)
    start = 2 * start_s(EXPERIMENT.constants, EXPERIMENT.traits)
    work_s = sum(moe_layer_s(1e-7, idle)) - 2 * start
    num_bytes = 2 * 256 * 2 * 512 * BYTES_PER_ELEMENT["bf16"]
    beside_s = []
    for share in (0.5, 2.0, 3.0):
        both_s = share * work_s
        path = replace(idle, bytes_per_s=4 * num_bytes / (both_s - 2 * start))
        assert sum(moe_layer_s(1e-7, path)) == pytest.approx(work_s + both_s)
        beside_s.append(sum(moe_layer_s(1e-7, path, overlaps=True)))
    taken = 24 / EXPERIMENT.cluster.device_types[0].num_multiprocessors
    assert beside_s[0] == pytest.approx(work_s * (1 + 0.5 * taken))
    assert 2 * work_s <= beside_s[1] < 2.2 * work_s  # nothing runs beside additions of gradients
    assert beside_s[2] - beside_s[1] == pytest.approx(work_s)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_sharing_experts_out_needs_less_memory(zero_stage: int) -> None:
    constants = replace(EXPERIMENT.constants, expert_imbalance=1.0)
    given = replace(EXPERIMENT, constants=constants)
    zero = Zero(stage=zero_stage)
    peaks = [
        estimate(StageOptions(tp=1, dp=8, ep=ep, zero=zero), given).peak_memory_bytes[0]
        for ep in (1, 2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_states_of_experts_are_sharded_over_those_who_hold_them() -> None:
    """With ZeRO-1 all states are sharded over eight ranks, whatever the experts' share."""
    given = EXPERIMENT
    memory = CostModel(experiment=given).memory
    (once, shared) = (
        memory(grid_of(dp=8, ep=ep, zero=Zero(stage=1), num_micro_batches=2)) for ep in (1, 4)
    )
    per = given.traits.bytes_per_parameter("bf16")
    states = (per.master + once.optimizer.moment_bytes) / 8
    for each, share in ((once, 1), (shared, 4)):
        dense = each.weights.prefix[-1] - each.weights.expert_prefix[-1]
        expected = dense * (per.kept + states)
        expected += EXPERT_PARAMETERS * (per.kept / share + states)
        kept = (per.kept + states) * each.layers[0, -1]
        assert kept == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ep", "shard_ranks", "expected"), [(2, 4, 2), (2, 2, 1), (4, 4, 1), (8, 4, 0), (2, 0, 0)]
)
def test_experts_have_as_many_shard_groups_as_other_weights(
    ep: int, shard_ranks: int, expected: int
) -> None:
    zero = Zero(stage=1, shard_ranks=shard_ranks)
    own = StageOptions(tp=1, dp=8, ep=ep, zero=zero).of_experts
    assert own.dp == 8 // ep
    assert own.zero == Zero(stage=1, shard_ranks=expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parts_of_the_memory_add_up_with_experts_shared_out(stage: int) -> None:
    model = CostModel(experiment=EXPERIMENT)
    plan = strategy(StageOptions(tp=2, dp=4, ep=4, etp=1, zero=Zero(stage=stage)))
    (parts,), (peak,) = model.memory_parts(plan), model.estimate(plan).peak_memory_bytes
    assert sum(parts.values()) == pytest.approx(peak)
    assert min(parts.values()) >= 0
    if stage == 0:
        weights = Weights(model=EXPERIMENT.model, tp=2, expert_ranks=4).prefix[-1]
        assert parts["weights"] == pytest.approx(2 * weights)


def test_experts_alone_synchronise_with_those_who_hold_them() -> None:
    ends = {
        ep: CostModel(experiment=EXPERIMENT)
        .stage_costs(PlacedStages.of_strategy(strategy(StageOptions(tp=1, dp=8, ep=ep))))
        .step_ends.at((0, LAYERS))
        for ep in (1, 8)
    }
    assert ends[8].gradient_sync_s < ends[1].gradient_sync_s
    assert ends[8].optimizer_s < ends[1].optimizer_s


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 4, 0), (2, 4, 1), (2, 2, 0), (1, 8, 0)])
def test_spread_experts_can_be_sharded_by_zero(stage: int, sizes: tuple[int, int, int]) -> None:
    tp, ep, etp = sizes
    plain = StageOptions(tp=tp, dp=8 // tp, ep=ep, etp=etp)
    sharded = replace(plain, zero=Zero(stage=stage))
    peaks = [estimate(options).peak_memory_bytes[0] for options in (plain, sharded)]
    assert peaks[1] < peaks[0]
    assert estimate(sharded).breakdown != estimate(plain).breakdown


def test_the_search_shares_experts_out_where_the_runtime_can() -> None:
    found = candidates_of(EXPERIMENT)
    degrees = {each.options.ep for each in found if isinstance(each, Candidate)}
    assert degrees == {1, 2, 4, 8}
    limited = replace(EXPERIMENT, limits=replace(EXPERIMENT.limits, max_ep=2))
    assert {each.options.ep for each in candidates_of(limited) if isinstance(each, Candidate)} == {
        1,
        2,
    }
    unable = replace(EXPERIMENT, traits=replace(EXPERIMENT.traits, expert_parallel=False))
    assert {each.options.ep for each in candidates_of(unable) if isinstance(each, Candidate)} == {1}


def test_bounds_of_candidates_hold_with_experts_shared_out() -> None:
    planner = AmpRayPlanner(experiment=EXPERIMENT)
    for candidate in candidates_of(EXPERIMENT):
        assert isinstance(candidate, Candidate)
        result = planner.plan(candidate)
        if isinstance(result, Estimate):
            assert planner.chooser.least_s(candidate, float("inf")) <= result.iteration_time_s * (
                1 + 1e-9
            )


def with_better_devices() -> Experiment:
    (slow,) = {each.device for each in EXPERIMENT.cluster.nodes}
    assert slow.bf16_flops is not None
    fast = replace(
        slow, bf16_flops=2 * slow.bf16_flops, memory_bytes_per_s=2 * slow.memory_bytes_per_s
    )
    nodes = tuple(replace(each, device=fast) for each in EXPERIMENT.cluster.nodes)
    return replace(EXPERIMENT, cluster=replace(EXPERIMENT.cluster, nodes=nodes))


@pytest.mark.parametrize(
    "better",
    [
        experiment_from(MOE.replace("intra_gbit_per_s: 2000", "intra_gbit_per_s: 6000")),
        experiment_from(MOE.replace("inter_gbit_per_s: 200", "inter_gbit_per_s: 600")),
        with_better_devices(),
    ],
    ids=["inside", "between", "devices"],
)
def test_better_hardware_never_makes_shared_experts_slower(better: Experiment) -> None:
    for tp, ep, etp in ((1, 8, 0), (2, 8, 1), (2, 4, 1), (4, 2, 0), (4, 2, 2), (1, 2, 0)):
        options = StageOptions(tp=tp, dp=8 // tp, ep=ep, etp=etp)
        before, after = (estimate(options, given) for given in (EXPERIMENT, better))
        assert after.iteration_time_s <= before.iteration_time_s * (1 + 1e-12)


def test_experts_lie_over_the_ranks_that_share_sequences_too() -> None:
    given = replace(EXPERIMENT, traits=RUNTIMES["megatron-core"])
    found = [
        estimate(StageOptions(tp=1, dp=8 // cp, cp=cp, ep=ep), given)
        for cp, ep in ((1, 8), (2, 8), (2, 1))
    ]
    assert all(each.feasible for each in found)
    sync_s = [each.breakdown.gradient_sync_s for each in found if each.breakdown]
    assert sync_s[0] == pytest.approx(sync_s[1])
    assert found[1].peak_memory_bytes < found[2].peak_memory_bytes


def test_a_degree_that_does_not_divide_the_experts_is_refused() -> None:
    given = experiment_from(MOE.replace("num_experts: 8", "num_experts: 6"))
    candidate = grid_of(dp=8, ep=4, num_micro_batches=2)
    result = AmpRayPlanner(experiment=given).plan(candidate)
    assert isinstance(result, Infeasible)
    assert str(result.reason) == "ep does not divide the experts: ep 4, num_experts 6"
    with pytest.raises(ValueError, match=r"ep x etp divides the ranks of a stage, found ep 3 x et"):
        StageOptions(tp=1, dp=8, ep=3)


def test_a_module_for_one_more_token_is_a_block_with_a_projection_and_a_loss() -> None:
    text = MOE.replace("num_experts: 8", "mtp_layers: 1, num_experts: 8")
    plain, longer = (experiment_from(given).model for given in (MOE, text))
    assert [layer.name for layer in longer.layers[-4:]] == [
        "moe-block",
        "mtp",
        "final-norm",
        "head",
    ]
    block, module, head = longer.layers[-4], longer.layers[-3], longer.layers[-1]
    assert module.kind == "block"
    assert module.logits == head.logits
    added = longer.num_parameters - plain.num_parameters
    assert added == block.num_parameters + 2 * 512 * 512 + 3 * 512
    flops = [sum(op.flops for op in layer.gemms) for layer in (module, block, head)]
    assert flops[0] == flops[1] + flops[2] + 2 * 256 * 2 * 512 * 512
    assert not longer.shape.is_trained
    model = CostModel(experiment=experiment_from(text))
    spread = model.time_tables.rank_model(1, 8, 1).layers[-3]
    experts = next(op for op in spread.gemms if op.is_expert)
    assert experts.batch == 1


def test_a_compiled_loop_launches_a_kernel_for_each_expert() -> None:
    """Of the host's time: four experts of a rank, two products of each, two more backward."""
    gap = EXPERIMENT.constants.kernel_gap_s
    rates = []
    for streams in (0, 4):
        seconds = []
        for gap_s in (gap, 2 * gap):
            traits = replace(EXPERIMENT.traits, expert_streams=streams)
            constants = replace(EXPERIMENT.constants, host_s_per_kernel=1e-3, kernel_gap_s=gap_s)
            model = CostModel(experiment=replace(EXPERIMENT, traits=traits, constants=constants))
            options = StageOptions(tp=1, dp=8, ep=2)
            table, _ = model.time_tables.table((0,), NO_RING, options, 2, NO_RING)
            seconds.append(table[:2, 3] - table[:2, 2])
        rates.append((seconds[1] - seconds[0]) / gap)
    assert (rates[1] - rates[0]).tolist() == pytest.approx([8, 16])


def test_recomputed_operators_are_names_of_operators() -> None:
    figures = "clamped_activation: true, num_experts: 8"
    latent = (
        "head_size: 64, key_value_rank: 64, query_rank: 96, rotary_head_size: 32, "
        f"value_head_size: 64, {figures}"
    )
    names = {
        op.name
        for text in (figures, latent)
        for layer in experiment_from(MOE.replace("num_experts: 8", text)).model.layers
        for op in layer.operators
    }
    names |= {op.name for layer in small_experiment().model.layers for op in layer.operators}
    parts = [part for pair in RECOMPUTED.values() for part in pair]
    assert {name for part in parts for name in part} <= names
