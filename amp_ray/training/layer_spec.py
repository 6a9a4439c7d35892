"""A layer as a recipe: built on the stages that own it only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """How to build a layer.

    Args:
        module: Class of the layer.
        arguments: In order.
        keywords: By name.
        tied_key: Layers with the same key share their ``weight``; None for layers of their own.
        forward_fn: What runs instead of the module itself, with the module as first argument.
    """

    module: type[Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    tied_key: str | None = None
    forward_fn: Callable[..., Any] | None = None

    def build(self) -> Any:  # noqa: ANN401 - a torch module
        """Make the layer with its starting weights."""
        return self.module(*self.arguments, **self.keywords)
