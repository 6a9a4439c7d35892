"""A layer as a recipe: built on the stages that own it only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """How to build a layer."""

    module: type[Any]  # class of the layer
    arguments: tuple[Any, ...]  # in order
    keywords: Mapping[str, Any] = field(default_factory=dict)  # by name
    # Layers with the same key share their ``weight``; None for layers of their own
    tied_key: str | None = None
    # What runs instead of the module itself, with the module as first argument
    forward_fn: Callable[..., Any] | None = None

    def build(self) -> Any:  # noqa: ANN401 - a torch module
        """Make the layer with its starting weights."""
        return self.module(*self.arguments, **self.keywords)
