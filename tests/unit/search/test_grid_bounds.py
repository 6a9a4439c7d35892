from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from amp_ray.partition.kernels import least_chain_s
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.grid_bounds import WholeLayers
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_ZERO, NO_ZERO, Zero
from support.checked import as_estimate, grid_of
from support.experiments import experiment_from

EQUAL_STAGES = """\
name: equal stages
model: {family: gpt2, num_layers: 16, hidden_size: 512, num_heads: 8, sequence_length: 256,
        vocab_size: 256}
cluster:
  nodes:
    - {count: 1, device: A100-40, slots: 8, intra_gbit_per_s: 8000, inter_gbit_per_s: 400}
global_batch_size: 8
"""


def brute_force_s(room: WholeLayers) -> float:
    """Compare every way to give stages layers and ends at cuts between nodes."""
    each_s = np.repeat(room.each_s, room.stages)
    best_s = np.inf
    most = range(room.num_layers + 1)
    for held in product(most, repeat=len(each_s)):
        if sum(held) != room.num_layers or held.count(0) > room.num_others:
            continue
        for ends in product(range(3), repeat=len(each_s)):
            if sum(ends) == room.num_ends:
                best_s = min(
                    best_s, float((np.array(held) * each_s + np.array(ends) * room.across_s).max())
                )
    return best_s


@pytest.mark.parametrize("seed", range(40))
def test_no_way_to_share_layers_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = rng.multinomial(int(rng.integers(1, 4)), [0.5, 0.5])
    room = WholeLayers(
        each_s=rng.integers(1, 6, 2).astype(np.float64)[stages > 0],
        stages=stages[stages > 0].astype(np.int64),
        num_layers=int(rng.integers(1, 7)),
        num_others=int(rng.integers(0, 3)),
        across_s=float(rng.integers(0, 4)),
        num_ends=int(rng.integers(0, 2 * stages.sum() + 1)),
    )
    best_s = brute_force_s(room)
    assert room.least_s() <= best_s
    if not room.num_ends and best_s < np.inf:
        assert room.least_s() == pytest.approx(best_s)


def pipeline(pp: int, num_micro_batches: int) -> Candidate:
    return grid_of(
        micro_batch_size=8 // num_micro_batches, pp=pp, num_micro_batches=num_micro_batches
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_no_pipeline_is_faster_than_its_bound(pp: int, num_micro_batches: int) -> None:
    planner = AmpRayPlanner(experiment=experiment_from(EQUAL_STAGES))
    candidate = pipeline(pp, num_micro_batches)
    best = as_estimate(planner.plan(candidate))
    least_s = planner.chooser.least_s(candidate, np.inf)
    assert 0.75 * best.iteration_time_s < least_s <= best.iteration_time_s


@pytest.mark.parametrize("seed", range(30))
def test_no_cuts_of_a_chain_are_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, pp, batches = 7, int(rng.integers(1, 5)), int(rng.integers(2, 7))
    forward, equal = rng.integers(1, 5, num_layers), rng.integers(0, 2, num_layers)
    rows = np.array([forward, 2 * forward, equal, 1 - equal], dtype=np.float64)
    prefix = np.hstack([np.zeros((4, 1)), rows.cumsum(axis=1)])
    rooms, num_again = rng.integers(1, 6, pp), int(rng.integers(0, 4))
    extras_s = 1.0, 0.5
    best_s = np.inf
    for cuts in combinations(range(1, num_layers), pp - 1):
        slowest_s = 0.0
        for stage, (start, end) in enumerate(pairwise((0, *cuts, num_layers))):
            forward_s, backward_s, likes, others = rows[:, start:end].sum(axis=1)
            first = min(others, num_again)
            backward_s += first * extras_s[1] + min(likes, num_again - first) * extras_s[0]
            late = max(batches - pp + stage, 0)
            stage_s = (batches - 1) * backward_s + late * forward_s
            slowest_s = max(slowest_s, stage_s if likes <= rooms[stage] else np.inf)
        best_s = min(best_s, slowest_s)
    least_s = least_chain_s(prefix, rooms, num_again, extras_s, batches)
    assert least_s == (best_s if best_s == np.inf else pytest.approx(best_s, rel=1e-5))
    assert least_s <= best_s


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("num_micro_batches", [4, 8])
def test_no_interleaved_pipeline_is_faster_than_its_bound(pp: int, num_micro_batches: int) -> None:
    planner = AmpRayPlanner(experiment=experiment_from(EQUAL_STAGES))
    for chunks in (2, 3, 4):
        candidate = replace(pipeline(pp, num_micro_batches), virtual_stages=chunks)
        best = as_estimate(planner.plan(candidate))
        least_s = planner.chooser.least_s(candidate, np.inf)
        assert 0.5 * best.iteration_time_s < least_s <= best.iteration_time_s


UNEVEN_EXPERTS = """\
name: experts on uneven nodes
model: {family: llama, num_layers: 8, hidden_size: 1024, num_heads: 8, sequence_length: 2048,
        vocab_size: 4096, num_experts: 8, experts_per_token: 2, expert_feed_forward_size: 2048}
cluster:
  nodes:
    - {count: 2, device: A100-40, slots: 6, inter_gbit_per_s: 20}
    - {device: A100-40, slots: 4, inter_gbit_per_s: 20}
global_batch_size: 32
runtime: megatron-core
recompute: auto
zero_stage: auto
"""


@pytest.mark.parametrize(
    ("tp", "dp", "ep"), [(1, 8, 1), (1, 8, 4), (2, 4, 2), (1, 4, 4), (2, 2, 1)]
)
def test_no_plan_of_a_larger_space_is_faster(tp: int, dp: int, ep: int) -> None:
    """Estimate all sizes of stages, with every number of recomputed blocks and ZeRO setting."""
    planner = AmpRayPlanner(experiment=experiment_from(UNEVEN_EXPERTS))
    pp = 16 // (tp * dp)
    options = StageOptions(tp=tp, dp=dp, ep=ep, etp=1 if ep > 1 else 0, sequence_parallel=tp > 1)
    for chunks, samples in product((1, 2) if pp == 4 else (1, 2, 3, 4), (1, 2)):
        grid = Candidate(
            micro_batch_size=samples,
            options=options,
            pp=pp,
            num_micro_batches=32 // (dp * samples),
            virtual_stages=chunks,
        )
        best_s = np.inf
        for cuts, again in product(combinations(range(1, 8), pp - 1), range(3)):
            bounds = (0, *(1 + cut for cut in cuts), 11)
            if chunks > 1 and min(np.diff((0, *cuts, 8))) < chunks:
                continue
            recompute = Recompute(kind="full", layers=again) if again else NO_RECOMPUTE
            for zero in (NO_ZERO, Zero(stage=1)):
                changed = replace(grid, options=replace(options, recompute=recompute, zero=zero))
                plan = planner.cost_model.estimate(Strategy.uniform(changed, bounds))
                best_s = min(best_s, plan.iteration_time_s if plan.feasible else np.inf)
        auto = replace(grid, options=replace(options, recompute=AUTO, zero=AUTO_ZERO))
        least_s = planner.chooser.least_s(auto, np.inf)
        assert 0 < least_s <= best_s
