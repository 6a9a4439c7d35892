"""The published formulas, against known points and against a loop over operators."""

import csv
import json
import math
import random
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.inputs.operator_profile import OperatorKey, OperatorProfile
from amp_ray.planners.aceso2024.cost import (
    AcesoCost,
    AcesoPlan,
    aceso_cost,
    collective_s,
    transfer_s,
)
from amp_ray.planners.aceso2024.profile import parse_aceso_profile
from amp_ray.planners.operators.cost import NOT_PROFILED
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.units import MIB
from support.aceso import GPT_ROWS, T5_ROWS, aceso_files, resnet_rows


def read(model: str, rows: tuple[str, ...], num_layers: int = 2, seed: int = 0) -> OperatorProfile:
    """Read a made-up folder."""
    files = aceso_files(model, rows, seed=seed)
    return parse_aceso_profile(files, folder="p", model=model, num_layers=num_layers)


def plan_of(stages: Sequence[Sequence[OperatorUse]], size: int, number: int) -> AcesoPlan:
    """Return a plan from how each operator is used."""
    return AcesoPlan(stages=stages, micro_batch_size=size, num_micro_batches=number)


def costed(profile: OperatorProfile, plan: AcesoPlan, devices_per_node: int = 8) -> AcesoCost:
    """Cost a plan that can be costed."""
    cost = aceso_cost(profile, plan, devices_per_node=devices_per_node)
    assert isinstance(cost, AcesoCost)
    return cost


def published_plan(path: Path) -> AcesoPlan:
    """Read a plan file with nothing but the standard library."""
    record = json.loads(path.read_text())
    keys = ("model_parallel_size_of_each_op", "data_parallel_size_of_each_op", "algo_of_each_op")
    stages = [
        list(zip(*lists, strict=True))
        for lists in zip(*(record[key] for key in (*keys, "recompute_ops")), strict=True)
    ]
    size = record["micro_batch_size"]
    return plan_of(stages, size, record["global_batch_size"] // size)


def test_known_points(aceso_data: Path) -> None:
    with (aceso_data / "known_points.csv").open() as file:
        points = list(csv.DictReader(file))
    assert len(points) == 6
    costs = []
    for point in points:
        folder = aceso_data / point["profile_db"]
        files = {path.name: path.read_text() for path in folder.glob("*.csv")}
        model, layers = f"gpt_{point['size']}", 32 if point["size"] == "2_6B" else 24
        profile = parse_aceso_profile(files, folder="p", model=model, num_layers=layers)
        cost = costed(profile, published_plan(aceso_data / point["config_json"]))
        assert f"{cost.iteration_s:.3f}" == point["aceso_model_predicted_s"]
        costs.append(cost)
    largest = max(costs[-1].memory, key=lambda memory: memory.total_bytes)
    assert (int(largest.normal_bytes / MIB), largest.reserved_bytes / MIB) == (25152, 1280)


def oracle(
    profile: OperatorProfile, plan: AcesoPlan, copies: int
) -> tuple[float, list[tuple[float, float]]]:
    """Cost a plan without resharding, one operator after the other, as the reference words it."""
    times, memory = [], []
    operators = count()
    for index, uses in enumerate(plan.stages):
        rows = []
        for tp, dp, algorithm, bit in uses:
            table = profile.tables[OperatorKey(plan.micro_batch_size // dp, tp, algorithm)]
            at = next(operators)
            rows.append((profile.names[at], table, at, bit))
        seconds = sum(t.forward_s[i] * (1 + bit) + t.backward_s[i] for _, t, i, bit in rows)
        seconds += transfer_s(profile.intra, rows[0][1].input_bytes[rows[0][2]])
        seconds += transfer_s(profile.intra, rows[-1][1].output_bytes[rows[-1][2]])
        times.append(seconds)
        kept = [profile.kept_share[i] * t.activation_bytes[i] for _, t, i, _ in rows]
        saved = peak = run = 0.0
        for i in range(len(rows) - 1):
            starts = profile.starts_block[rows[i + 1][2]]
            if rows[i][3] and rows[i + 1][3]:
                run += kept[i]
                saved += 0 if starts else kept[i]
                if starts:
                    peak, run = max(peak, run), 0.0
            else:
                peak, run = max(peak, run), 0.0
        ends_with_it = len(rows) > 1 and rows[-1][3] and rows[-2][3]
        if not (ends_with_it and profile.kept_share[rows[-2][2]] != 1):
            peak = max(peak, run)
        weights = sum(t.weight_bytes[i] for _, t, i, _ in rows)
        flight = rows[0][1].input_bytes[rows[0][2]] + sum(kept) - saved
        behind = len(plan.stages) - 1 - index
        forward = max((t.forward_reserved_bytes[i] for _, t, i, _ in rows[:-1]), default=0.0)
        backward = max((t.backward_reserved_bytes[i] for _, t, i, _ in rows[:-1]), default=0.0)
        memory.append(
            (
                copies * weights + (behind + 1) * flight + peak,
                max(forward + backward, weights),
            )
        )
    number = plan.num_micro_batches
    return max((number - 1) * t + sum(times) for t in times), memory


@pytest.mark.parametrize(
    ("model", "rows", "copies"),
    [("gpt_x", GPT_ROWS, 8), ("t5_x", T5_ROWS, 8), ("resnet_x", resnet_rows(), 4)],
)
def test_equals_a_loop_over_operators(model: str, rows: tuple[str, ...], copies: int) -> None:
    chance = random.Random(7)
    for seed in range(10):
        profile = read(model, rows, seed=seed)
        for _ in range(10):
            cuts = sorted(chance.sample(range(1, profile.num_operators), 3))
            bounds = [0, *cuts, profile.num_operators]
            share = chance.random()
            stages: list[list[OperatorUse]] = [
                [(1, 1, 0, chance.random() < share) for _ in range(end - first)]
                for first, end in pairwise(bounds)
            ]
            plan = plan_of(stages, chance.choice([1, 2, 4]), 8)
            cost = costed(profile, plan)
            expected_s, memory = oracle(profile, plan, copies)
            assert math.isclose(cost.iteration_s, expected_s, rel_tol=1e-12)
            for held, (normal, reserved) in zip(cost.memory, memory, strict=True):
                assert math.isclose(held.normal_bytes, normal, rel_tol=1e-12)
                assert math.isclose(held.reserved_bytes, reserved, rel_tol=1e-12)


def test_a_run_that_ends_a_stage_is_forgotten_and_told() -> None:
    profile = read("gpt_x", GPT_ROWS)
    bits = [4 <= index <= 6 for index in range(7)]  # softmax, dropout and context, where it is cut
    first: list[OperatorUse] = [(1, 1, 0, bit) for bit in bits]
    rest: list[OperatorUse] = [(1, 1, 0, False)] * (profile.num_operators - len(first))
    memory = costed(profile, plan_of([first, rest], 1, 4)).memory[0]
    table = profile.tables[OperatorKey(1, 1, 0)]
    assert memory.recomputed_bytes == 0
    assert memory.omitted_bytes == 1.5 * table.activation_bytes[5]


def test_transfers_between_nodes_use_their_own_table() -> None:
    profile = read("gpt_x", GPT_ROWS)
    half = profile.num_operators // 2
    stages: list[list[OperatorUse]] = [
        [(1, 1, 0, False)] * half,
        [(1, 1, 0, False)] * (profile.num_operators - half),
    ]
    near = costed(profile, plan_of(stages, 1, 4), devices_per_node=2)
    far = costed(profile, plan_of(stages, 1, 4), devices_per_node=1)
    size = profile.tables[OperatorKey(1, 1, 0)].output_bytes[half - 1]
    more_s = transfer_s(profile.inter, size) - transfer_s(profile.intra, size)
    assert far.times[0].transfer_s - near.times[0].transfer_s == pytest.approx(more_s)
    assert more_s > 0


@pytest.mark.parametrize(
    ("size_mib", "rate"), [(1, 4.0), (1.9, 4.0), (2, 4.0), (4, 5.0), (16, 7.0), (1000, 9.0)]
)
def test_the_rate_of_a_transfer_is_that_of_the_size_before(size_mib: float, rate: float) -> None:
    profile = read("gpt_x", GPT_ROWS)
    expected_s = size_mib / (rate * 1e3)
    assert transfer_s(profile.intra, size_mib * MIB) == pytest.approx(expected_s)


def test_small_transfers_get_a_rate_from_the_other_end() -> None:
    intra = read("gpt_x", GPT_ROWS).intra
    assert transfer_s(intra, 0) == 0
    assert transfer_s(intra, MIB / 2) == pytest.approx(0.5 / 9e3)
    assert transfer_s(intra, MIB / 4) == pytest.approx(0.25 / 8e3)
    assert transfer_s(intra, 1.0) > 0


def test_a_change_of_degrees_within_a_stage_is_an_exchange() -> None:
    profile = read("gpt_x", GPT_ROWS)
    number = profile.num_operators
    uses: list[OperatorUse] = [(2, 1, 0, False)] * 9 + [(1, 2, 0, False)] * (number - 9)
    time = costed(profile, plan_of([uses], 2, 4)).times[0]
    size = profile.tables[OperatorKey(1, 1, 0)].input_bytes[9]
    assert time.resharding_s == pytest.approx(profile.collectives["all_gather", 2].exact_s(size))
    assert time.num_missing == 0
    even = costed(profile, plan_of([[(2, 1, 0, False)] * number], 2, 4)).times[0]
    assert even.resharding_s == 0


def test_another_algorithm_is_an_exchange_before_and_behind() -> None:
    profile = read("gpt_x", GPT_ROWS)
    uses: list[OperatorUse] = [(2, 1, 0, False)] * profile.num_operators
    uses[2] = (2, 1, 1, False)  # qkv by rows: its part is there, but whole heads must be divided
    time = costed(profile, plan_of([uses], 2, 4)).times[0]
    sizes = [
        profile.tables[OperatorKey(2, 2, algorithm)].input_bytes[index]
        for index, algorithm in ((2, 1), (3, 0))
    ]
    prices = [collective_s(profile, "all_gather", 2, size) for size in sizes]
    assert time.resharding_s == pytest.approx(sum(price or math.nan for price in prices))


def test_t5_has_no_resharding() -> None:
    profile = read("t5_x", T5_ROWS)
    number = profile.num_operators
    uses: list[OperatorUse] = [(2, 1, 0, False)] * 9 + [(1, 2, 0, False)] * (number - 9)
    assert costed(profile, plan_of([uses], 2, 4)).times[0].resharding_s == 0


def test_a_collective_is_looked_up_at_its_size_or_one_less() -> None:
    profile = read("gpt_x", GPT_ROWS)
    table = profile.collectives["all_to_all", 2]
    assert collective_s(profile, "all_to_all", 2, 64 * MIB) == table.exact_s(64 * MIB)
    assert collective_s(profile, "all_to_all", 2, 65.4 * MIB) == table.exact_s(64 * MIB)
    assert collective_s(profile, "all_to_all", 2, 66 * MIB) is None
    assert collective_s(profile, "all_to_all", 4, 64 * MIB) is None


def test_what_was_not_measured_has_no_price() -> None:
    profile = read("gpt_x", GPT_ROWS)
    for use, size in (((4, 1), 2), ((1, 2), 1), ((1, 1), 8)):
        uses: list[OperatorUse] = [(*use, 0, False)] * profile.num_operators
        reason = aceso_cost(profile, plan_of([uses], size, 4), devices_per_node=8)
        assert isinstance(reason, Reason)
        assert reason.kind == NOT_PROFILED
