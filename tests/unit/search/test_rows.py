from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Cost
from amp_ray.inputs.experiment import Experiment
from amp_ray.report.strategy_text import with_idle
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking
from amp_ray.search.rows import flat_row, ranking_rows, row, shown_bound_s
from amp_ray.search.space import candidates_of
from support.checked import as_estimate, required
from support.experiments import small_experiment


def ranking(*replacements: tuple[str, str]) -> tuple[Ranking, Experiment]:
    experiment = small_experiment(*replacements)
    planner = AmpRayPlanner(experiment=experiment)
    return search_candidates(planner, candidates_of(experiment), workers=ALONE), experiment


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_of_the_memory_add_up_to_the_peak(stage: int) -> None:
    more = f"recompute: full\nzero_stage: {stage}\nglobal_batch_size:"
    found, experiment = ranking(("global_batch_size:", more))
    planner = AmpRayPlanner(experiment=experiment)
    for entry in ranking_rows(found, experiment, planner, num_rows=None):
        if entry["iteration_time_s"] is not None:
            sums = [sum(parts.values()) for parts in entry["memory_bytes"]]
            assert sums == pytest.approx(entry["peak_memory_bytes"], abs=8)
            assert min(min(parts.values()) for parts in entry["memory_bytes"]) >= 0


def test_rates_follow_from_the_iteration() -> None:
    found, experiment = ranking()
    entry = ranking_rows(found, experiment, num_rows=1)[0]
    shape, time_s = experiment.model.shape, entry["iteration_time_s"]
    devices = len(entry["strategy"]["placement"])
    tokens = experiment.global_batch_size * shape.sequence_length
    assert entry["tokens_per_s"] == pytest.approx(tokens / time_s)
    assert entry["tokens_per_s_per_device"] == pytest.approx(tokens / time_s / devices)
    hidden, length = shape.hidden_size, shape.sequence_length
    block = 24 * hidden**2 + 2 * hidden * length  # causal attention by halves
    flops = 3 * tokens * (shape.num_layers * block + 2 * hidden * shape.vocab_size)
    peak = sum(node.num_slots * node.device.peak_flops("fp16") for node in experiment.cluster.nodes)
    assert entry["mfu"] == pytest.approx(flops / time_s / peak)
    assert entry["training"] is None


def test_tokens_become_days_hours_and_money() -> None:
    found, experiment = ranking(("global_batch_size:", "tokens: 1e+9\nglobal_batch_size:"))
    best = as_estimate(found.results[0])
    priced = replace(best, cost=Cost(devices=2.0, egress=1.0))
    (entry,) = (row(priced, 1, experiment),)
    iterations = 1e9 / experiment.global_batch_size / experiment.model.shape.sequence_length
    assert entry["training"]["money"] == pytest.approx(3 * iterations)
    assert entry["training"]["days"] == pytest.approx(iterations * best.iteration_time_s / 86400)
    hours = entry["training"]["days"] * 24 * len(best.strategy.placement)
    assert entry["training"]["device_hours"] == pytest.approx(hours)


def test_idle_devices_are_counted_by_board() -> None:
    found, experiment = ranking()
    best = required(found.best)
    assert "idle_devices" not in row(best, 1, experiment)
    _, larger = ranking(("count: 2", "count: 3"))
    record = row(best, 1, larger)
    assert record["idle_devices"] == {"T4": 2}
    assert with_idle("tp 2", record["idle_devices"]) == "tp 2, 2 x T4 idle"
    assert flat_row(record)["idle_devices"] == 2


@pytest.mark.parametrize(("bound_s", "shown"), [(None, None), (0.9, None), (1.0, 1.0), (2.0, 2.0)])
def test_a_bound_below_half_of_the_time_is_left_out(
    bound_s: float | None, shown: float | None
) -> None:
    assert shown_bound_s(bound_s, 2.0) == shown


def test_flat_rows_name_the_remedies() -> None:
    remedies = [
        {"change": "ZeRO 2", "iteration_time_s": 1.0},
        {"change": "pp 4", "iteration_time_s": 2.0},
    ]
    assert flat_row({"remedies": remedies}) == {"remedies": "ZeRO 2; pp 4"}


def test_flat_rows_keep_lists_of_plain_values() -> None:
    strategy = {
        "bounds": [0, 2, 9],
        "recompute": ["none", {"kind": "full", "layers": 2}],
        "placement": None,
        "stages": [{"layers": [0, 2]}],
        "token_slices": [[1, [64, 64]]],
    }
    memory_bytes = [{"weights": 1, "context": 2}, {"weights": 3, "context": 4}]
    record = {"interval_s": [1.0, 2.0], "memory_bytes": memory_bytes}
    assert flat_row({"strategy": strategy, "cost": None, **record}) == {
        "bounds": [0, 2, 9],
        "recompute": ["none", "full:2"],
        "interval_s": [1.0, 2.0],
        "memory_weights": [1, 3],
        "memory_context": [2, 4],
    }
