"""One node more never makes the plan slower, and bounds exclude no grid that is fast enough."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import amp_ray as amp
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.run import fastest_within
from amp_ray.search.space import IdleWindow, idle_candidates
from support.experiments import experiment_from

TEXT = """\
name: nodes
model: {{family: {family}, num_layers: {layers}, hidden_size: 1024, num_heads: 8,
        sequence_length: 512, vocab_size: 8192{model}}}
cluster:
  nodes:
{nodes}
runtime: {runtime}
global_batch_size: {batch}
precision: fp16
zero_stage: {zero}
recompute: none
search: {{space: {space}, idle_devices: true, micro_batch_sizes: [1, 2]}}
"""
NODE = "    - {{count: {count}, device: {device}, slots: 2, inter_gbit_per_s: {rate}}}"
CASES: dict[str, tuple[Sequence[int], dict[str, Any]]] = {
    "many": ((1, 2, 3, 5, 7, 8, 11, 12, 13, 17, 19, 23, 31, 37, 40), {"batch": 24, "layers": 5}),
    "zero": ((1, 2, 3, 5, 7, 8, 9, 11), {"runtime": "deepspeed", "zero": "auto", "batch": 20}),
    "slow network": ((1, 2, 3, 4, 5), {"rate": 1, "runtime": "torch"}),
    "experts": (
        (1, 2, 3, 4, 5, 7),
        {"family": "llama", "model": ", num_experts: 4, experts_per_token: 2"},
    ),
    "placement": ((1, 2, 3, 4, 5), {"space": "placement", "runtime": "deepspeed"}),
    "always sharded": ((1, 2, 3, 4, 5, 7), {"runtime": "fsdp2", "zero": 3}),
    "always sharded, no tp": ((1, 2, 3, 5, 6), {"runtime": "llm-foundry", "zero": "auto"}),
}


def experiment_on(*counts: int, rate: int = 400, **settings: Any) -> Experiment:  # noqa: ANN401 - of many types
    """Return an experiment on nodes of one kind, or of two."""
    kinds = zip(counts, ("V100-32", "T4"), strict=False)
    nodes = [NODE.format(count=count, device=device, rate=rate) for count, device in kinds if count]
    defaults = {"family": "gpt2", "model": "", "layers": 4, "runtime": "megatron-core"}
    defaults |= {"batch": 12, "zero": 0, "space": "uniform"}
    return experiment_from(TEXT.format(nodes="\n".join(nodes), **{**defaults, **settings}))


def fastest(experiment: Experiment) -> Estimate:
    """Return the fastest strategy of a plan."""
    best = amp.plan(experiment, num_rows=1, workers=0).planned.ranking.fastest
    assert best is not None
    return best


@pytest.mark.parametrize("case", CASES)
def test_one_node_more_is_never_slower(case: str) -> None:
    counts, settings = CASES[case]
    times_s = [fastest(experiment_on(count, **settings)).iteration_time_s for count in counts]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] < times_s[0] or case == "slow network"


@pytest.mark.parametrize("added", [(3, 2), (2, 3), (4, 2)])
def test_one_node_more_of_a_kind_is_never_slower(added: Sequence[int]) -> None:
    before = fastest(experiment_on(2, 2)).iteration_time_s
    assert fastest(experiment_on(*added)).iteration_time_s <= before


def test_rows_name_idle_devices_by_kind() -> None:
    experiment = experiment_on(13, batch=24, layers=5)
    best = amp.plan(experiment, num_rows=1, workers=0).to_json(num_rows=1)["ranking"][0]
    used = best["strategy"]["tp"] * best["strategy"]["pp"] * best["strategy"]["dp"]
    assert best["idle_devices"] == {"V100-32": 26 - used}
    assert used % 2 == 0  # whole nodes
    kept = replace(experiment.limits, idle_devices=False)
    assert "idle_devices" not in str(amp.plan(replace(experiment, limits=kept)).to_json())


@pytest.mark.parametrize(
    "settings", [{}, {"runtime": "deepspeed", "layers": 7}, CASES["experts"][1]]
)
def test_no_window_leaves_out_a_grid_that_is_fast_enough(settings: dict[str, Any]) -> None:
    experiment = experiment_on(3, **settings)
    planner = AmpRayPlanner(experiment=experiment)
    within = planner.candidates().within
    assert within is not None
    plans = {grid: planner.plan(grid) for grid in idle_candidates(experiment)}
    times_s = {
        grid: plan.iteration_time_s for grid, plan in plans.items() if isinstance(plan, Estimate)
    }
    for limit_s in sorted(times_s.values())[:: max(1, len(times_s) // 10)]:
        kept = set(within(1, 5, limit_s).candidates)
        assert {grid for grid, time_s in times_s.items() if time_s <= limit_s} <= kept


def test_windows_divide_the_grids() -> None:
    experiment = experiment_on(3)
    whole = idle_candidates(experiment)
    parts = [
        idle_candidates(experiment, IdleWindow(least_devices=least, most_devices=most))
        for least, most in ((4, 5), (1, 3))
    ]
    assert whole == tuple(sorted((*parts[0], *parts[1])))


def test_the_fastest_within_a_limit_is_that_of_the_plan() -> None:
    experiment = experiment_on(3)
    planner, best = AmpRayPlanner(experiment=experiment), fastest(experiment)
    found = fastest_within(planner)
    assert found is not None
    assert found.iteration_time_s == best.iteration_time_s
    assert fastest_within(planner, best.iteration_time_s * (1 - 1e-6)) is None
    assert math.isfinite(found.iteration_time_s)
