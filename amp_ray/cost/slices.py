"""Slices of sequences in the cost model: their places, and the model of one."""

from dataclasses import replace
from itertools import accumulate

from amp_ray.errors import InputError
from amp_ray.spec.blocks import Kernels
from amp_ray.spec.families import build_model
from amp_ray.spec.model import Model
from amp_ray.spec.strategy import TokenSlices
from amp_ray.spec.traits import LAYER_LISTS, RuntimeTraits, kernels_of


def slice_places(token_slices: TokenSlices) -> list[tuple[int, int, int]]:
    """Return sequences, tokens and tokens of context of every slice, in order.

    Example:
        >>> slice_places(((2, (6, 2)),))
        [(2, 6, 0), (2, 2, 6)]
    """
    return [
        (sequences, size, end - size)
        for sequences, tokens in token_slices
        for end, size in zip(accumulate(tokens), tokens, strict=True)
    ]


def largest_share(token_slices: TokenSlices) -> float:
    """Return the part of a micro-batch that its largest slice is.

    Example:
        >>> largest_share(((2, (6, 2)), (1, (4, 4))))
        0.5
    """
    whole = sum(sequences * sum(tokens) for sequences, tokens in token_slices)
    return max(sequences * max(tokens) for sequences, tokens in token_slices) / whole


def slice_model(model: Model, traits: RuntimeTraits, *, tokens: int, context: int) -> Model:
    """Return a model whose sequences are as long as a slice and attend to a context.

    Raises:
        InputError: If the model has no tokens, or was built in a way that cannot be repeated.
    """
    if not model.shape.is_causal:
        message = f"model family {model.shape.family!r} has no sequence to cut into token slices"
        raise InputError(message)
    kernels = kernels_of(traits, context)
    return shorter_model(model, traits, tokens=tokens, kernels=kernels)


def shorter_model(model: Model, traits: RuntimeTraits, *, tokens: int, kernels: Kernels) -> Model:
    """Return a model as another one, with sequences of so many tokens.

    Raises:
        InputError: If it was built in a way that cannot be repeated.
    """
    for layer_list in LAYER_LISTS:
        built = build_model(
            replace(model.shape, sequence_length=tokens),
            layer_list=layer_list,
            vocabulary_multiple=traits.vocabulary_multiple,
            kernels=kernels,
        )
        if [layer.kind for layer in built.layers] == [layer.kind for layer in model.layers]:
            return built
    message = (
        f"the layers of {model.name} are no list of its family: parts of sequences have no times"
    )
    raise InputError(message)
