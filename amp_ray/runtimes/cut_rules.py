"""Rules by which training programs cut a model into stages, if they take no cuts."""

from itertools import accumulate

from amp_ray.models.model import Model


def weighed_bounds(model: Model, pp: int) -> tuple[int, ...] | None:
    """Return the cuts of nanotron; None if its last stage gets neither blocks nor head.

    It fills each stage until the weights of its blocks and head together exceed the stage's share.

    References:
        nanotron 0.4, models/base.py (``build_model``), models/llama.py
        (``get_block_compute_costs``).
    """
    shape = model.shape
    weights = {
        "block": shape.hidden_size * (4 * shape.hidden_size + 3 * shape.feed_forward_size),
        "head": shape.hidden_size * shape.vocab_size,
    }
    sums = list(accumulate(weights.get(layer.kind, 0) for layer in model.layers))
    bounds = [0]
    for end, weight in enumerate(sums, start=1):
        if weight > sums[-1] * (len(bounds) / pp):
            bounds.append(end)
    is_full = len(bounds) == pp and bounds[-1] < model.num_layers
    return (*bounds, model.num_layers) if is_full else None
