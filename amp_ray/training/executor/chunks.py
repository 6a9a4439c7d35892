"""Forward and backward passes through a rank's layers, one unit at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_ray.cost.instructions import Unit
from amp_ray.strategies.candidate import StageOptions
from amp_ray.training.image import ImageBlock
from amp_ray.training.parallel import LayerSpec
from amp_ray.training.transformer import Block, Passed, TokenWindow, recomputed

Layer = Callable[[Tensor], Tensor]


class _Kept(NamedTuple):
    """Input and output of a unit's forward pass, for its backward pass."""

    source: Tensor
    output: Tensor


class BuiltChunk(NamedTuple):
    """The layers of one chunk."""

    modules: nn.ModuleList  # the chunk's modules, each once
    run: tuple[Layer, ...]  # functions that run in sequence
    lent: tuple[nn.Module, ...] = ()  # modules whose weights are also used by other layers


def build_chunks(
    specs: Sequence[LayerSpec], chunks: Sequence[tuple[int, int]], stage: StageOptions
) -> list[BuiltChunk]:
    """Build the layers of every chunk of a stage.

    ``specs`` are the layers of the whole model, ``chunks`` the first and the end layer of each
    chunk; ``stage`` says which recomputation to use, and how many of the stage's first blocks
    recompute.
    """
    kind, layers = stage.recompute.kind, stage.recompute.layers
    num_recomputed = 0 if kind == "none" else len(specs) if layers is None else layers
    built = []
    for first, end in chunks:
        modules, tied, run = nn.ModuleList(), dict[str | None, nn.Module](), list[Layer]()
        lent = list[nn.Module]()
        for spec in specs[first:end]:
            module = tied.get(spec.tied_key) if spec.tied_key is not None else None
            if module is None:
                module = tied[spec.tied_key] = spec.build()
                modules.append(module)
            layer: Layer = module
            if spec.forward_fn is not None:
                layer = partial(spec.forward_fn, module)
                lent.append(module)
            if isinstance(module, Block | ImageBlock) and num_recomputed > 0:
                num_recomputed -= 1
                if kind == "selective":
                    module.attention_layer.recompute_core = True
                else:
                    layer = partial(recomputed, layer)
            run.append(layer)
        built.append(BuiltChunk(modules, tuple(run), tuple(lent)))
    return built


class Chunks:
    """Runs units and stores the tensors for their backward passes.

    ``window`` has the current tokens, read by all layers with attention or positions.
    """

    def __init__(self, runs: Sequence[Sequence[Layer]], window: TokenWindow) -> None:
        self.runs, self.window = runs, window
        self.kept: dict[Unit, _Kept] = {}
        self.passed: dict[tuple[int, int], Passed] = {}

    def forward(
        self,
        unit: Unit,
        source: Tensor,
        tokens: Sequence[int],
        loss: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Run a unit's layers, and then ``loss`` unless it is None.

        The input ``source`` gets a gradient if it comes from another stage. ``tokens`` has the
        lengths of all token slices of the micro-batch; it is empty if sequences are whole.
        """
        self._look_at(unit, tokens)
        value = source
        for layer in self.runs[unit.chunk]:
            value = layer(value)
        output = value if loss is None else loss(value)
        self.kept[unit] = _Kept(source, output)
        return output.detach()

    def backward(self, unit: Unit, gradient: Tensor | None, tokens: Sequence[int]) -> Tensor | None:
        """Accumulate the gradients of a unit's weights, and return its input's gradient."""
        passed = self._look_at(unit, tokens)
        kept = self.kept.pop(unit)
        roots, gradients = [kept.output], [gradient]
        if passed is not None:
            made, passed_gradients = passed.backward_roots(unit.token_slice)
            roots, gradients = [*roots, *made], [*gradients, *passed_gradients]
        torch.autograd.backward(roots, gradients)
        result: Tensor | None = kept.source.grad
        return result

    def _look_at(self, unit: Unit, tokens: Sequence[int]) -> Passed | None:
        """Set the window to a unit's tokens; called before both passes, for recomputation."""
        place = (unit.chunk, unit.micro_batch)
        passed = self.passed.setdefault(place, Passed()) if len(tokens) > 1 else None
        self.window.first = sum(tokens[: unit.token_slice])
        self.window.token_slice, self.window.passed = unit.token_slice, passed
        return passed

    def forget(self) -> None:
        """Drop the keys and values of the finished step."""
        self.passed.clear()
