"""Which layers the chunks of an interleaved schedule have."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from amp_ray.models.model import Model
from amp_ray.strategies.strategy import Strategy


def chunk_bounds(model: Model, bounds: Sequence[int], virtual_stages: int) -> tuple[int, ...]:
    """Divide the blocks of every stage among its chunks, in the order of an interleaved schedule.

    A stage keeps its number of blocks, which then are no longer neighbours: chunk 0 of all stages
    comes first, then chunk 1. What is no block stays with the end of the model that it belongs to.

    Args:
        model: The chain of layers.
        bounds: Of the stages.
        virtual_stages: Chunks per stage.

    Returns:
        Bounds of all chunks; two are equal where a stage has fewer blocks than chunks.
    """
    blocks = model.indices("block")
    counts = [sum(first <= block < end for block in blocks) for first, end in pairwise(bounds)]
    sizes = [
        (chunk + 1) * count // virtual_stages - chunk * count // virtual_stages
        for chunk in range(virtual_stages)
        for count in counts
    ]
    starts = [(*blocks, model.num_layers)[done] for done in accumulate(sizes[:-1])]
    return (0, *starts, model.num_layers)


def all_bounds(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Return the bounds of all chunks of a strategy; of its stages where they are no more than one.

    Returns:
        ``pp * virtual_stages + 1`` layers.
    """
    if strategy.virtual_stages == 1 or strategy.chunk_bounds:
        return strategy.given_bounds
    return chunk_bounds(model, strategy.bounds, strategy.virtual_stages)
