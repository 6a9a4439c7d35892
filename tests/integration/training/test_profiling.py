"""The program measures layers, slices and the rest of a step, until memory runs out."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from .conftest import MODELS, WarmRanks, make_job

pytestmark = pytest.mark.integration

HUGE = 2**42
"""A micro-batch size for which no machine has enough memory."""

Measure = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measure(warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Return a function that measures points of a model and returns the events with the results."""

    def run(
        model: str,
        points: list[dict[str, int]],
        *,
        num_ranks: int = 1,
        step: bool = False,
        seconds: float = 3600,
    ) -> list[dict[str, Any]]:
        trial = make_job(model, dp=num_ranks, micro_batch_size=8 // num_ranks)
        folder = tmp_path_factory.mktemp("profile")
        job = {"links": [], "points": points, "seconds": seconds, "step": step}
        ended = warm_ranks.run(trial, folder, profile=job)
        assert ended.result["complete"] == (seconds > 0)
        kinds = {"layer", "slice", "oom", "step"}
        return [event for event in ended.events(0) if event["event"] in kinds]

    return run


def test_out_of_memory_ends_what_is_as_large_and_not_the_run(measure: Measure) -> None:
    layers = [(HUGE, 1), (HUGE, 0), (2 * HUGE, 0), (1, 4)]
    slices = [(HUGE, 4, 4), (HUGE, 8, 4), (HUGE, 8, 8), (1, 4, 12), (1, 16, 0)]
    points = [{"tp": 1, "micro_batch_size": size, "layer": layer} for size, layer in layers]
    points += [
        {"tp": 1, "micro_batch_size": size, "layer": 1, "tokens": tokens, "context": context}
        for size, tokens, context in slices
    ]
    events = measure("gpt2", points)
    assert [(event["event"], event["tokens"], event["layer"]) for event in events] == [
        ("oom", 0, 1),
        ("layer", 0, 4),
        ("oom", 4, 1),
        ("slice", 4, 1),
        ("slice", 16, 1),
    ]


def test_when_the_time_is_up_no_measurement_begins(measure: Measure) -> None:
    assert measure("gpt2", [{"tp": 1, "micro_batch_size": 1, "layer": 1}], seconds=0) == []


def test_every_layer_of_a_generator_and_its_step_are_measured(measure: Measure) -> None:
    points = [{"tp": 1, "micro_batch_size": 2, "layer": layer} for layer in range(6)]
    step, *layers = measure("transgan", points, step=True)
    assert step["host_s_per_iteration"] >= 0
    assert step["memory_bytes_per_s"] > 1e8
    assert [event["layer"] for event in layers] == list(range(6))
    assert layers[1]["kept_bytes"] == layers[2]["kept_bytes"] > 0


def test_experts_are_measured_where_tp_divides_them(measure: Measure) -> None:
    # The layers are embedding, a dense block, a block with experts, norm, head; then the loss.
    assert MODELS["shared-experts"]["first_dense_layers"] == 1
    points = [
        {"tp": tp, "micro_batch_size": 1, "layer": layer}
        for tp, layer in product((1, 2), (0, 1, 2, 5, 6, 7))
    ]
    events = measure("shared-experts", points, num_ranks=2)
    assert [(event["tp"], event["layer"]) for event in events] == [
        (point["tp"], point["layer"]) for point in points
    ]
    assert all(event["forward_s"] > 0 and event["backward_s"] > 0 for event in events)
