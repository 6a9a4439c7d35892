"""From what every rank measured to the one result of a trial; plain values only."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.trials.steps import summarise_steps

SCHEMA: Final = 1
STAGE_SPANS: Final = (
    "forward",
    "backward",
    "tensor_parallel",
    "send",
    "receive",
    "load",
    "gradient_sync",
    "optimizer",
)


Chunk = tuple[int, int]
"""First layer, and the one after the last."""


def summarise(
    trial_id: str,
    warmup_steps: int,
    stages: Sequence[Sequence[Chunk]],
    ranks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the content of ``result.json``.

    A step takes as long as its slowest rank; so does each piece of a stage. ``iteration_time_s`` is
    the mean of the steps after the warm-up, as far as that is found; all steps are kept. In a
    stage, ``forward_s`` and ``backward_s`` include ``tensor_parallel_s``, and ``receive_s``
    includes the wait for the neighbour. ``ranks`` has one report per process: ``stage``,
    ``step_s``, ``losses``, ``spans_s`` (mean per measured step) and ``peak_memory_bytes`` among
    others; ``stages`` the chunks of every stage.
    """
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    return {
        "schema": SCHEMA,
        "trial_id": trial_id,
        "iteration_time_s": summarise_steps(step_s[warmup_steps:]).mean_s,
        "warmup_steps": warmup_steps,
        "step_s": step_s,
        "losses": list(ranks[0]["losses"]),
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "stages": [
            _stage(chunks, [rank for rank in ranks if rank["stage"] == stage])
            for stage, chunks in enumerate(stages)
        ],
        "ranks": [dict(rank) for rank in ranks],
    }


def _stage(chunks: Sequence[Chunk], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one stage took, by its slowest rank."""
    layers = [list(chunk) for chunk in chunks]
    return {
        **({"layers": layers[0]} if len(layers) == 1 else {"chunks": layers}),
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        **{
            f"{name}_s": max(rank["spans_s"].get(name, 0.0) for rank in ranks)
            for name in STAGE_SPANS
        },
    }
