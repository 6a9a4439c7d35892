"""Even splits, which need no costs."""


def even_bounds(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers evenly by number: the first ``num_layers % num_stages`` stages get one more.

    Args:
        num_layers: Of the chain.
        num_stages: At most one per layer.

    Returns:
        ``(0, ..., num_layers)``, of length ``num_stages + 1``.

    Raises:
        ValueError: If there are no stages, or more stages than layers.

    Example:
        >>> even_bounds(10, 4)
        (0, 3, 6, 8, 10)
    """
    if not 1 <= num_stages <= num_layers:
        msg = (
            f"num_stages is {num_stages}, but the chain has {num_layers} layers: "
            f"expected 1 to {num_layers} stages"
        )
        raise ValueError(msg)
    size, longer = divmod(num_layers, num_stages)
    return tuple(stage * size + min(stage, longer) for stage in range(num_stages + 1))
