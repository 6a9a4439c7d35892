"""The tokens of a pass, and the keys and values of earlier slices.

A micro-batch may run in slices of its tokens. Attention of a slice reads the keys and values of
earlier slices. The backward pass takes the slices in reverse and sums the gradients of keys and
values from all later slices into the slice that computed them.

References:
    Li et al., TeraPipe, arXiv:2102.07988.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from amp_ray.training.context import ContextParallel


class _Entry(NamedTuple):
    """Keys and values of one slice in one layer, and the copies that later slices read."""

    made: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Passed:
    """Keys and values of one micro-batch in one chunk."""

    # Entries by layer and slice index
    entries: dict[int, dict[int, _Entry]] = field(default_factory=lambda: defaultdict(dict))

    def backward_roots(self, token_slice: int) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return a slice's keys and values, and their gradients from later slices."""
        made, gradients = [], []
        for layer in self.entries.values():
            entry = layer.pop(token_slice)
            for tensor, leaf in zip(entry.made, entry.read, strict=True):
                if leaf.grad is not None:
                    made.append(tensor)
                    gradients.append(leaf.grad)
        return made, gradients


@dataclass(slots=True)
class TokenWindow:
    """The slice of tokens that the layers of a rank currently process."""

    first: int = 0  # number of tokens before the slice
    token_slice: int = 0  # index of the slice
    # Keys and values of its micro-batch; None if sequences are whole
    passed: Passed | None = None
    # Ranks that divide every sequence; None without context parallelism
    context: ContextParallel | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the current tokens in their sequence."""
        if self.context is not None:
            return self.context.positions(tokens, device)
        return torch.arange(self.first, self.first + tokens, device=device)

    def own_tokens(self, value: Tensor) -> Tensor:
        """Return this rank's tokens of whole sequences."""
        return value if self.context is None else self.context.own_tokens(value)

    def begin_behind(self, layer: int, context: Tensor) -> None:
        """Set the window to a slice after ``context``; an empty context means the first slice.

        The context has keys and values, shape ``(2, batch, heads, tokens, head_size)``.
        """
        self.first, self.token_slice, self.passed = 0, 0, Passed()
        if context.shape[3]:
            self.extend(layer, *context)
            self.first, self.token_slice = context.shape[3], 1

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the keys and values of earlier slices, along dimension 2.

        Recomputation in the backward pass gets the same keys and values as the forward pass.
        """
        if self.passed is None:
            return key, value
        entries = self.passed.entries[layer]
        if self.token_slice not in entries:
            leaves = key.detach().requires_grad_(), value.detach().requires_grad_()
            entries[self.token_slice] = _Entry((key, value), leaves)
        if self.token_slice == 0:
            return key, value
        earlier = [entries[index].read for index in range(self.token_slice)]
        return (
            torch.cat([*(entry[0] for entry in earlier), key], dim=2),
            torch.cat([*(entry[1] for entry in earlier), value], dim=2),
        )


def visible(tokens: int, before: int, device: torch.device) -> Tensor:
    """Return the mask of the ``before + tokens`` keys that each of ``tokens`` queries sees."""
    everything = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device)
    return everything.tril(diagonal=before)
