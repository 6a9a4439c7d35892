"""Plans of operators by our own cost model."""

import csv
import json
from pathlib import Path

import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.operator_profile import OperatorKey
from amp_ray.planners.aceso2024.plan_file import read_aceso_plan
from amp_ray.planners.operators.planner import OperatorPlanner
from amp_ray.planners.operators.strategy import operator_strategy
from amp_ray.search.space import candidates_of
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy
from support.aceso import EXPERIMENT, aceso_experiment
from support.checked import as_estimate, required
from support.experiments import experiment_from


def plan(*stages: tuple[int, OperatorUse], samples: int = 2, micro_batches: int = 8) -> Strategy:
    """Return a plan whose stages use all of their operators alike."""
    return operator_strategy(
        [[use] * number for number, use in stages],
        samples_per_micro_batch=samples,
        num_micro_batches=micro_batches,
    )


def scored(strategy: Strategy, experiment: Experiment | None = None) -> Estimate:
    """Score a plan that has a price."""
    chosen = experiment or aceso_experiment()
    return as_estimate(OperatorPlanner(experiment=chosen).score(strategy))


ONE_NODE = "count: 1, device: T4, slots: 4"
HALVES = ((14, (1, 2, 0, False)), (15, (1, 2, 0, False)))


def test_a_plan_adds_up_to_its_parts() -> None:
    experiment = aceso_experiment()
    result = scored(plan(*HALVES), experiment)
    profile = required(experiment.profile.operators)
    table = profile.tables[OperatorKey(1, 1, 0)]
    passes_s = table.forward_s + table.backward_s
    host_s = experiment.constants.host_s_per_micro_batch
    size = float(table.output_bytes[13])
    across_s = 2 * size / float(profile.inter.bytes_per_s[4])  # 16 MiB; two ranks share the network
    times = [passes_s[:14].sum() + across_s + host_s, passes_s[14:].sum() + across_s + host_s]
    pipeline_s = sum(times) + 7 * max(times)
    assert result.breakdown is not None
    after_s = result.breakdown.gradient_sync_s + result.breakdown.optimizer_s
    assert after_s > 0
    assert result.iteration_time_s == pytest.approx(
        pipeline_s + after_s + experiment.constants.host_s_per_iteration
    )


def test_gradients_between_nodes_and_the_optimizer_are_not_free() -> None:
    experiment = aceso_experiment()
    alone = scored(plan((29, (1, 4, 0, False)), samples=4, micro_batches=4), experiment)
    assert alone.breakdown is not None
    within = aceso_experiment(EXPERIMENT.replace("count: 2, device: T4, slots: 2", ONE_NODE))
    near = scored(plan((29, (1, 4, 0, False)), samples=4, micro_batches=4), within)
    assert near.breakdown is not None
    assert alone.breakdown.gradient_sync_s > 2 * near.breakdown.gradient_sync_s > 0
    assert alone.breakdown.optimizer_s == near.breakdown.optimizer_s > 0


def test_a_stage_with_other_degrees_pays_for_the_layout_that_it_asks_for() -> None:
    one_node = aceso_experiment(EXPERIMENT.replace("count: 2, device: T4, slots: 2", ONE_NODE))
    even = scored(plan(*HALVES), one_node).breakdown
    narrow = scored(
        plan((14, (1, 2, 0, False)), (8, (1, 1, 0, False)), (7, (1, 1, 0, False))), one_node
    ).breakdown
    assert even is not None
    assert narrow is not None
    assert narrow.pipeline_p2p_s > 1.2 * even.pipeline_p2p_s


def test_memory_holds_what_is_in_flight_and_recompute_spares_it() -> None:
    kept = scored(plan(*HALVES)).peak_memory_bytes
    spared = scored(plan((14, (1, 2, 0, True)), (15, (1, 2, 0, False)))).peak_memory_bytes
    assert spared[0] < kept[0]
    assert spared[1] == kept[1]
    few = scored(plan(*HALVES, micro_batches=1, samples=2)).peak_memory_bytes
    assert few[0] < kept[0]
    assert few[1] == kept[1]


def test_sizes_between_the_measured_ones_are_interpolated_and_say_so() -> None:
    text = EXPERIMENT.replace("batch_size: 16", "batch_size: 12")
    result = scored(plan(*HALVES, samples=6, micro_batches=2), aceso_experiment(text))
    assert any("interpolated" in warning for warning in result.warnings)
    assert not any("interpolated" in warning for warning in scored(plan(*HALVES)).warnings)


def test_what_was_not_measured_or_lies_on_two_nodes_has_no_price() -> None:
    planner = OperatorPlanner(experiment=aceso_experiment())
    unknown = planner.score(plan((29, (4, 1, 0, False))))
    assert isinstance(unknown, Infeasible)
    assert "stage 0: micro-batch size 2, tp 4" in str(unknown.reason)
    split = planner.score(
        plan((10, (1, 1, 0, False)), (10, (2, 1, 0, False)), (9, (1, 1, 0, False)), samples=1)
    )
    assert isinstance(split, Infeasible)
    assert "two nodes" in str(split.reason)


def test_full_recompute_runs_every_block_again() -> None:
    text = f"{EXPERIMENT}search: {{space: operator}}\n"
    results = {}
    for recompute in ("none", "full", "auto"):
        experiment = aceso_experiment(f"{text}recompute: {recompute}\n")
        planner = OperatorPlanner(experiment=experiment)
        planned = [planner.plan(candidate) for candidate in candidates_of(experiment)]
        results[recompute] = min(
            (own for own in planned if isinstance(own, Estimate)),
            key=lambda own: own.iteration_time_s,
        )
    runs = [run for stage in results["full"].strategy.stages for run in stage.operators]
    again = [run.recompute for run in runs for _ in range(run.num_operators)]
    assert again == [False] + [True] * 26 + [False] * 2
    assert results["none"].iteration_time_s == results["auto"].iteration_time_s
    assert results["none"].iteration_time_s < results["full"].iteration_time_s


SHAPES = {"350M": (24, 1024, 16), "1_3B": (24, 2048, 32), "2_6B": (32, 2560, 32)}


def test_known_points_uncalibrated(aceso_data: Path) -> None:
    with (aceso_data / "known_points.csv").open() as file:
        points = [row for row in csv.DictReader(file) if (aceso_data / row["config_json"]).exists()]
    assert len(points) >= 5
    errors = []
    for point in points:
        experiment = known_experiment(aceso_data, point)
        path = aceso_data / point["config_json"]
        record = json.loads(path.read_text())
        strategy = read_aceso_plan(record, file=path.name, experiment=experiment)
        seconds = scored(strategy, experiment).iteration_time_s
        errors.append(abs(seconds / float(point["actual_iter_s"]) - 1))
    assert sum(errors) / len(errors) < 0.03


def known_experiment(aceso_data: Path, point: dict[str, str]) -> Experiment:
    """Build the experiment of a published point."""
    layers, hidden, heads = SHAPES[point["size"]]
    model = (
        f"{{family: gpt2, num_layers: {layers}, hidden_size: {hidden}, num_heads: {heads}, "
        "sequence_length: 2048, vocab_size: 51200}"
    )
    node = (
        f"{{device: V100-32, slots: {point['gpus_per_node']}, intra_gbit_per_s: 340, "
        "inter_gbit_per_s: 100}"
    )
    text = f"""
name: known
model: {model}
cluster: {{nodes: [{node}]}}
profile: {{source: aceso, path: p, model: gpt_{point["size"]}}}
global_batch_size: {point["global_batch"]}
"""
    folder = aceso_data / point["profile_db"]
    return experiment_from(text, {f"p/{own.name}": own.read_text() for own in folder.glob("*.csv")})
