"""Random problems of operators, small enough for the oracle."""

from typing import Any

import numpy as np

from amp_ray.planners.operators.partition.problem import OperatorProblem


def random_operators(
    rng: np.random.Generator, *, num_operators: int, num_devices: int, kind: str
) -> OperatorProblem:
    """Make a problem.

    Args:
        rng: Source of all figures.
        num_operators: Number of operators of the chain.
        num_devices: Number of devices; a solution takes all of them.
        kind: ``published`` has the published model's rules for memory peaks; ``repeated`` has
            equal layers; ``ends`` has work after the pipeline; ``forced`` has operators that are
            always recomputed; ``plain`` has none of these.
    """
    sizes = [size for size in (1, 2, 4) if size <= num_devices]
    devices = np.array([size for size in sizes for _ in range(int(rng.integers(1, 3)))])
    shape = (len(devices), num_operators)
    period = int(rng.integers(2, 5))
    starts_layer = rng.random(num_operators) < 0.3
    if kind == "repeated":
        starts_layer = np.arange(num_operators) % period == 0
    forced: dict[str, Any] = {}
    if kind == "forced":
        starts_layer[:] = True
        forced = {"runs_again": np.append(rng.random(num_operators - 1) < 0.5, False)}

    def table(most: int) -> np.ndarray:
        values = rng.integers(0, most + 1, shape).astype(float)
        if kind == "repeated":
            values = values[:, np.arange(num_operators) % period]
        return values

    forward = (table(40) + 1) / 64
    time_s = forward * (2 + table(4) / 4)
    held, state, weight = table(12) + 1, table(6), table(3)
    edges = (len(devices), 2, num_operators + 1)
    all_held = float(held.sum(axis=1).max() + state.sum(axis=1).max())
    ends = {} if kind != "ends" else _step_ends(rng, shape)
    start_s = rng.integers(0, 8, edges) / 64
    if forced:
        start_s[:, :, 1:][:, :, forced["runs_again"]] = np.inf
    return OperatorProblem(
        time_s=time_s,
        join_s=table(2) / 64,
        recompute_s=forward,
        state_bytes=state,
        weight_bytes=weight,
        held_bytes=held,
        input_bytes=table(4),
        forward_reserved_bytes=table(5),
        backward_reserved_bytes=table(5),
        start_s=start_s,
        end_s=rng.integers(0, 8, edges) / 64,
        starts_layer=starts_layer,
        free_end=rng.random(num_operators) < (0.3 if kind == "published" else 0.0),
        counts_last=kind == "published",
        devices=devices,
        allowed=rng.random((len(devices), num_devices)) < 0.95,
        edge_kind=rng.integers(0, 2, num_devices + 1),
        limit_bytes=float(int(all_held * rng.uniform(0.3, 1.5))),
        num_micro_batches=int(rng.integers(1, 12)),
        most_stages=int(rng.integers(1, num_devices + 1)),
        **ends,
        **forced,
    )


def _step_ends(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, Any]:
    """Limit the micro-batches in flight, count all reserved memory, and add a step end."""
    return {
        "most_in_flight": int(rng.integers(1, 4)),
        "reserves_last": True,
        "step_end_s": rng.integers(0, 200, shape) / 64,
        "step_start_s": rng.integers(0, 200, shape[0]) / 64,
        "tied_s": rng.integers(0, 200, shape[0]) / 64,
    }
