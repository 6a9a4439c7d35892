import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.samples import context_costs, non_negative
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.slice_table import parse_slice_table
from amp_ray.partition.slices import SliceTables, packed_index
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.search.token_slices import Granules, granules_of, plan_slices, slice_tables
from amp_ray.strategies.candidate import Candidate, StageOptions, with_kind
from amp_ray.strategies.recompute import AUTO, FULL, NO_RECOMPUTE
from support.checked import as_estimate, required
from support.experiments import experiment_from

GRANULARITY, TOKENS, BATCH = 8, 64, 3


def measured_s(sequences: int, size: int, context: int) -> float:
    """Return what a layer takes, without any regularity at no context."""
    alone = 1e-3 + 1e-5 * sequences * size * (1 + 0.3 * np.sin(7 * sequences + size))
    return float(alone + 1e-6 * sequences * context + 1e-7 * sequences * size * context)


def points(**changes: object) -> dict[str, Any]:
    sizes = range(GRANULARITY, TOKENS + 1, GRANULARITY)
    places = [(b, s, 0) for b in range(1, BATCH + 1) for s in sizes]
    places += [(b, s, c) for b in range(1, BATCH + 1) for s in (16, 32) for c in (16, 32)]
    found: dict[str, Any] = {
        f"{b}_{s}_{c}": {
            "forward_mean": measured_s(b, s, c),
            "backward_mean": 2 * measured_s(b, s, c),
        }
        for b, s, c in places
    }
    return found | changes


def tables(**changes: object) -> SliceTables:
    record: dict[str, Any] = {
        "batch": BATCH,
        "tokens": TOKENS,
        "granularity": GRANULARITY,
        "stages": 4,
        "context": "fitted",
        "points": points(),
    }
    return slice_tables(parse_slice_table(json.dumps(record | changes), file="table"))


def cell(size: int, context: int) -> int:
    return packed_index((size + context) // GRANULARITY, size // GRANULARITY)


def test_what_was_measured_without_context_is_kept_exactly() -> None:
    found = tables()
    for sequences in range(1, BATCH + 1):
        for size in range(GRANULARITY, TOKENS + 1, GRANULARITY):
            time_s = found.forward_s[sequences - 1, cell(size, 0)]
            assert time_s == measured_s(sequences, size, 0)


def test_context_that_follows_the_model_is_found() -> None:
    found = tables()
    assert found.backward_s[2, cell(24, 40)] == pytest.approx(2 * measured_s(3, 24, 40), rel=1e-9)


def test_noise_makes_no_context_cheaper_than_none() -> None:
    rng = np.random.default_rng(0)
    noisy = points()
    for key, point in noisy.items():
        if not key.endswith("_0"):
            point["forward_mean"] = measured_s(*map(int, key.split("_"))) * rng.uniform(0.1, 0.9)
    found = tables(points=noisy)
    for size in (8, 16, 32):
        row = [found.forward_s[0, cell(size, context)] for context in range(0, TOKENS - size, 8)]
        assert row == sorted(row)


def test_messages_take_the_time_of_all_their_tokens() -> None:
    talk = {"tokens": [1, 1000], "seconds": [0.0, 999.0]}
    alone, found = tables(), tables(communication=talk, layers=2)
    for sequences in range(1, BATCH + 1):
        for size, context in ((8, 0), (24, 16), (64, 0)):
            at = sequences - 1, cell(size, context)
            message_s = sequences * size - 1
            assert found.forward_s[at] == 2 * alone.forward_s[at] + message_s
            assert found.backward_s[at] == 2 * alone.backward_s[at] + message_s


def test_a_size_that_was_not_measured_cannot_run() -> None:
    fewer = points()
    del fewer["2_24_0"]
    found = tables(points=fewer)
    assert found.forward_s[1, cell(24, 8)] == np.inf
    assert np.isfinite(found.forward_s[1, cell(16, 8)])
    assert np.isfinite(found.forward_s[1, cell(32, 8)])


def test_what_ran_out_of_memory_with_context_takes_larger_slices_with_it() -> None:
    fewer = points()
    del fewer["2_32_32"]
    found = tables(points=fewer)
    assert found.forward_s[1, cell(32, 32)] == found.forward_s[2, cell(32, 32)] == np.inf
    assert np.isfinite(found.forward_s[1, cell(32, 24)])
    assert np.isfinite(found.forward_s[0, cell(32, 32)])


def test_a_context_of_one_token_is_measured_with_context() -> None:
    places = [(b, s, c) for b in (1, 2) for s in (1, 2, 3) for c in range(4 - s)]
    measured = {
        f"{b}_{s}_{c}": {"forward_mean": 1.0 * b * s + c, "backward_mean": 1.0 * b * s + c}
        for b, s, c in places
        if (b, s, c) != (2, 2, 1)
    }
    found = tables(points=measured, batch=2, tokens=3, granularity=1)
    assert found.forward_s[1, packed_index(3, 2)] == np.inf
    assert np.isfinite(found.forward_s[0]).all()


def test_the_last_slice_takes_what_the_granularity_leaves() -> None:
    granules = Granules(tokens=62, granularity=8)
    assert granules.count == 8
    assert granules.in_tokens(((1, (3, 5)),)) == ((1, (24, 38)),)
    found = tables(tokens=62)
    time_s = found.forward_s[0, packed_index(8, 2)]  # 14 tokens after 48
    assert found.forward_s[0, packed_index(7, 1)] < time_s < found.forward_s[0, packed_index(8, 3)]


def test_points_are_taken_as_they_are_without_a_fit() -> None:
    dense = {
        f"{b}_{s}_{c}": {
            "forward_mean": 1.0 * b + s,
            "backward_mean": 1.0 * c,
            "memory_mb": 1.0 * s,
        }
        for b in range(1, BATCH + 1)
        for c in range(0, TOKENS, 8)
        for s in range(8, TOKENS - c + 1, 8)
    }
    del dense["1_16_24"]
    beyond = {"9_8_0": dense["1_8_0"], "1_64_8": dense["1_8_0"], "1_12_0": dense["1_8_0"]}
    found = tables(points=dense | beyond, context="measured", memory_cap_mb=40)
    assert found.forward_s[1, cell(24, 8)] == 26.0
    assert found.backward_s[1, cell(24, 8)] == 8.0
    assert found.forward_s[0, cell(16, 24)] == np.inf
    assert np.isfinite(found.forward_s[0, cell(40, 0)])
    assert found.forward_s[0, cell(48, 0)] == np.inf
    assert np.isinf(found.forward_s).sum() == 1 + BATCH * (3 + 2 + 1)


def test_coefficients_are_those_of_all_non_negative_ones() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.random((6, 2)), rng.normal(size=6)
        found = non_negative(columns, target)
        grid = [(x, y) for x in np.linspace(0, 3, 61) for y in np.linspace(0, 3, 61)]
        best = min(float(((columns @ each - target) ** 2).sum()) for each in map(np.array, grid))
        assert min(found) >= 0
        assert ((columns @ np.array(found) - target) ** 2).sum() <= best + 1e-12


def test_without_context_in_the_measurement_context_is_free() -> None:
    alone = {key: point for key, point in points().items() if key.endswith("_0")}
    table = {"batch": 3, "tokens": 64, "granularity": 8, "stages": 1, "points": alone}
    assert context_costs(parse_slice_table(json.dumps(table), file="t").points, 0) == (0.0, 0.0)


TEXT = """\
name: long
model: {family: llama, num_layers: 16, hidden_size: 4096, num_heads: 32, sequence_length: 16384,
        vocab_size: 32000}
cluster:
  nodes: [{count: 1, device: A100-80, slots: 4, intra_gbit_per_s: 2400, inter_gbit_per_s: 100}]
runtime: torch
recompute: full
global_batch_size: 2
search: {token_slices: true}
"""


def candidate(*, size: int = 1, pp: int = 4) -> Candidate:
    options = StageOptions(tp=4 // pp, dp=1, recompute=experiment().recompute)
    return Candidate(micro_batch_size=size, options=options, pp=pp, num_micro_batches=2 // size)


def experiment(*replacements: tuple[str, str]) -> Experiment:
    text = TEXT
    for before, after in replacements:
        assert before in text
        text = text.replace(before, after)
    return experiment_from(text)


def planned(given: Experiment, own: Candidate) -> Estimate:
    return as_estimate(AmpRayPlanner(experiment=given).plan(own))


def test_a_long_sequence_in_a_deep_pipeline_is_cut() -> None:
    whole = planned(experiment(("token_slices: true", "token_slices: false")), candidate(size=2))
    sliced = planned(experiment(), candidate(size=2))
    assert whole.strategy.token_slices == ()
    ((sequences, tokens),) = sliced.strategy.token_slices
    assert sequences == 2
    assert sum(tokens) == 16384
    assert len(tokens) > 2
    assert sliced.iteration_time_s < 0.8 * whole.iteration_time_s


def test_no_candidate_gets_slower() -> None:
    off = AmpRayPlanner(experiment=experiment(("token_slices: true", "token_slices: false")))
    on = AmpRayPlanner(experiment=experiment())
    for own in uniform_candidates(experiment()):
        before, after = off.plan(own), on.plan(own)
        if isinstance(before, Estimate):
            assert isinstance(after, Estimate)
            if before.feasible:
                assert after.feasible
                assert after.iteration_time_s <= before.iteration_time_s


def test_one_stage_keeps_its_micro_batches_whole() -> None:
    assert planned(experiment(), candidate(pp=1)).strategy.token_slices == ()


def test_what_the_runtime_cannot_launch_is_not_proposed_where_that_matters() -> None:
    text = ("search: {token_slices: true}", "search: {token_slices: true, launchable: true}")
    given = experiment(text)
    unable = replace(given, traits=replace(given.traits, token_slices=False))
    assert planned(unable, candidate(size=2)).strategy.token_slices == ()
    able = replace(given, traits=replace(given.traits, token_slices=True))
    found = planned(able, candidate(size=2))
    assert found.strategy.token_slices
    assert found.launchable


@pytest.mark.parametrize("granularity", [1000, 4096])
def test_slices_begin_at_multiples_of_the_granularity(granularity: int) -> None:
    text = ("token_slices: true", f"token_slices: true, slice_granularity: {granularity}")
    ((_, tokens),) = planned(experiment(text), candidate(size=2)).strategy.token_slices
    assert all(size % granularity == 0 for size in tokens[:-1])
    assert sum(tokens) == 16384


def test_a_thirty_second_of_a_sequence_is_a_granule_unless_told() -> None:
    assert granules_of(experiment()).granularity == 512


def test_memory_keeps_slices_short() -> None:
    longest = []
    for gib in (800, 34.5):
        memory = ("slots: 4,", f"slots: 4, memory_gib: {gib},")
        planner = AmpRayPlanner(experiment=experiment(("recompute: full\n", ""), memory))
        options = StageOptions(tp=1, dp=1)
        one = Candidate(micro_batch_size=1, options=options, pp=4, num_micro_batches=2)
        costs = planner.cost_model.costs(one)
        found = required(plan_slices(planner.cost_model, one, costs, (0, 5, 10, 15, 19)))
        assert found.feasible
        longest.append(max(found.strategy.token_slices[0][1]))
    assert longest[1] < longest[0]


def test_recompute_and_slices_are_chosen_together() -> None:
    given = experiment(("recompute: full", "recompute: auto"))
    own = with_kind(candidate(size=2), AUTO)
    found = planned(given, own)
    fixed = [planned(given, with_kind(own, kind)) for kind in (FULL, NO_RECOMPUTE)]
    assert found.strategy.token_slices
    best_s = min(each.iteration_time_s for each in fixed if each.feasible)
    assert found.iteration_time_s <= best_s * (1 + 1e-9)
