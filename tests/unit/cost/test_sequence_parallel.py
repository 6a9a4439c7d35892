"""Sequence parallelism by the equations of Korthikanti et al., arXiv:2205.05198."""

from dataclasses import replace

import pytest

from amp_ray.clusters.device import find_device
from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, taken_share
from amp_ray.cost.layers import LayerAnchors, LayerWork
from amp_ray.cost.memory import LayerMemory
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.roofline import Phases, Rank, device_phases
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import RecomputeKind
from amp_ray.strategies.strategy import Strategy
from support.experiments import SMALL, experiment_from

GIVEN = experiment_from(SMALL + "runtime: megatron-lm-2022\n")
S, H, A, TP, B = 128, 256, 8, 2, 3
"""Tokens, width, heads, tp and micro-batch size."""

STREAM = S * B * H
WHOLE = Rank(device=find_device("T4"), tp=TP, micro_batch_size=B, precision="fp16")
DIVIDED = replace(WHOLE, sequence_parallel=True)
RING = Path(bytes_per_s=1e9, step_s=0.0)
BLOCK = next(layer for layer in GIVEN.model.layers if layer.kind == "block")
OPTIONS = StageOptions(tp=TP, dp=1)
BOUNDS = (0, 4, 9)


def kept(rank: Rank, recompute: RecomputeKind = "none") -> float:
    memory = LayerMemory(model=GIVEN.model, rank=rank, traits=GIVEN.traits)
    return memory.kept_bytes(BLOCK, recompute)


def test_activations_are_those_of_the_paper() -> None:
    scores = 5 * A * S * S * B
    assert kept(WHOLE) == pytest.approx(STREAM * (10 + 24 / TP) + scores / TP)
    assert kept(WHOLE, "selective") == pytest.approx(STREAM * (10 + 24 / TP))
    assert kept(DIVIDED) == pytest.approx((34 * STREAM + scores) / TP)
    assert kept(DIVIDED, "selective") == pytest.approx(34 * STREAM / TP)
    assert kept(DIVIDED, "full") == pytest.approx(kept(WHOLE, "full") / TP)


@pytest.mark.parametrize(
    ("hidden", "layers", "size", "ahead", "gib"),
    [(6144, 48, 4, 1.0, 9.5625), (12288, 96, 1, 1 + 7 / 24, 12.3515625)],
)
def test_published_models_keep_what_was_published(
    hidden: int, layers: int, size: int, ahead: float, gib: float
) -> None:
    figures = f"num_layers: {layers}, hidden_size: {hidden}, num_heads: {hidden // 128}"
    text = SMALL.replace("num_layers: 6, hidden_size: 256, num_heads: 8", figures)
    given = experiment_from(text.replace(": 128,", ": 2048,") + "runtime: megatron-lm-2022\n")
    rank = replace(DIVIDED, tp=8, micro_batch_size=size)
    memory = LayerMemory(model=given.model, rank=rank, traits=given.traits)
    block = next(layer for layer in given.model.layers if layer.kind == "block")
    # of the first of 8 stages, 3 chunks each
    kept_bytes = layers * ahead * memory.kept_bytes(block, "selective")
    assert kept_bytes == pytest.approx(gib * 2**30, rel=1e-3)


def talk_s(rank: Rank, compute: Phases, *, overlaps: bool) -> tuple[float, float]:
    traits = replace(GIVEN.traits, overlaps_backward_all_reduce=overlaps)
    work = LayerWork(layer=BLOCK, anchors=LayerAnchors(), traits=traits, constants=GIVEN.constants)
    return work.talk_s(rank, RING, compute)


def test_an_all_reduce_becomes_a_scatter_and_a_gather() -> None:
    start = GIVEN.constants.collective_start_s
    alone = Phases(forward_s=1.0, backward_s=2.0)
    reduce_s, gather_s = (
        collective(2.0 * STREAM, TP, RING, start) for collective in (all_reduce_s, all_gather_s)
    )
    assert talk_s(WHOLE, alone, overlaps=False) == pytest.approx((2 * reduce_s, 2 * reduce_s))
    assert talk_s(DIVIDED, alone, overlaps=False) == pytest.approx((4 * gather_s, 6 * gather_s))


def test_gradients_hide_what_their_products_can_hide() -> None:
    slow = Phases(forward_s=1.0, backward_s=9.0, weight_gradient_s=4.0, input_gradient_s=4.0)
    taken = taken_share(WHOLE.device)  # of the multiprocessors, which those products lack
    forward_s, backward_s = talk_s(DIVIDED, slow, overlaps=True)
    # Of products divided by rows, and of four that overlap, as many as in a forward pass.
    assert backward_s == pytest.approx(forward_s / 2 + taken * forward_s)
    reduces_s, whole_s = talk_s(WHOLE, slow, overlaps=True)
    assert whole_s == pytest.approx(taken * reduces_s)


def test_ranks_divide_what_tensor_parallelism_leaves_whole() -> None:
    norms = [op for op in BLOCK.elementwise if not op.sharded]
    constants = replace(GIVEN.constants, kernel_gap_s=0.0)
    whole, divided = (device_phases(norms, rank, constants) for rank in (WHOLE, DIVIDED))
    assert divided.forward_s == pytest.approx(whole.forward_s / TP)
    assert divided.backward_s == pytest.approx(whole.backward_s / TP)


def costs(options: StageOptions) -> tuple[CostModel, StageCosts, Strategy]:
    candidate = Candidate(micro_batch_size=B, options=options, pp=2, num_micro_batches=4)
    cost_model = CostModel(experiment=GIVEN)
    return cost_model, cost_model.costs(candidate), Strategy.uniform(candidate, BOUNDS)


def test_a_message_is_a_share_that_nobody_gathers() -> None:
    _, whole, _ = costs(OPTIONS)
    _, divided, _ = costs(replace(OPTIONS, sequence_parallel=True))
    alone = replace(whole.messages.model.traits, sliced_activations=False, sliced_gradients=False)
    unsliced = CostModel(experiment=replace(GIVEN, traits=alone)).stage_costs(whole.stages)
    start = GIVEN.constants.collective_start_s + GIVEN.cluster.nodes[0].inter.latency_s
    once, twice = divided.messages.at(BOUNDS) - start, unsliced.messages.at(BOUNDS) - start
    assert once == pytest.approx(twice / TP)
    assert (divided.messages.at(BOUNDS) < whole.messages.at(BOUNDS)).all()
    rows, _ = divided.messages.rows()
    assert rows[0, BOUNDS[1]] == pytest.approx(divided.messages.at(BOUNDS).max())


def test_gradients_of_norms_are_added_up_over_tensor_parallel_ranks() -> None:
    _, whole, _ = costs(OPTIONS)
    _, divided, _ = costs(replace(OPTIONS, sequence_parallel=True))
    more_s = (
        divided.step_ends.at(BOUNDS).gradient_sync_s - whole.step_ends.at(BOUNDS).gradient_sync_s
    )
    assert 0 < more_s < 1e-3


def test_the_whole_takes_less_memory() -> None:
    peaks = []
    for options in (OPTIONS, replace(OPTIONS, sequence_parallel=True)):
        cost_model, found, strategy = costs(options)
        estimate = cost_model.with_columns(cost_model.estimate_from(found, strategy))
        assert estimate.launchable
        peaks.append(estimate.peak_memory_bytes)
    assert all(less < more for less, more in zip(peaks[1], peaks[0], strict=True))


def test_gathers_beside_their_products_leave_one_piece_to_see() -> None:
    """Slow links are seen but for the products, fast ones by one piece in tp."""
    alone = Phases(forward_s=1.0, backward_s=2.0)

    def both_s(rate: float, *, overlaps: bool) -> tuple[float, float]:
        traits = replace(GIVEN.traits, overlaps_gathers=overlaps)
        work = LayerWork(
            layer=BLOCK, anchors=LayerAnchors(), traits=traits, constants=GIVEN.constants
        )
        return work.talk_s(DIVIDED, replace(RING, bytes_per_s=rate), alone)

    fast, piece = (both_s(1e12, overlaps=overlaps)[0] for overlaps in (False, True))
    assert fast / TP <= piece * (1 + 1e-9) < fast
    for rate in (1e8, 1e9, 1e10, 1e12):
        plain, split = (both_s(rate, overlaps=overlaps) for overlaps in (False, True))
        assert split[0] < plain[0]
        assert split[1] < plain[1]


def added_by_slow_starts(slots: int, *, pp: int) -> float:
    """Return how much longer an iteration is where each start takes 1 s for each rank."""
    text = SMALL.replace("count: 2", "count: 1").replace("slots: 2", f"slots: {slots}")
    if slots < TP * pp:
        text = SMALL
    given = experiment_from(text + "runtime: megatron-lm-2022\n")
    options = replace(OPTIONS, sequence_parallel=True)
    candidate = Candidate(micro_batch_size=B, options=options, pp=pp, num_micro_batches=1)
    strategy = Strategy.uniform(candidate, (0, 9) if pp == 1 else (0, 5, 9))
    slow = replace(given, traits=replace(given.traits, piped_collective_s=1.0))
    quick_s, slow_s = (
        CostModel(experiment=each).estimate(strategy).iteration_time_s for each in (given, slow)
    )
    return slow_s - quick_s


def test_a_pipeline_over_nodes_starts_collectives_as_slowly_as_the_program_does() -> None:
    """Four gathers and scatters forward, six backward in each of six blocks, 1 s for each rank."""
    assert added_by_slow_starts(2, pp=2) == pytest.approx(6 * 10 * TP, rel=0.1)
    assert added_by_slow_starts(4, pp=2) == 0.0
    assert added_by_slow_starts(2, pp=1) == 0.0
