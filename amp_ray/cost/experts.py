"""Layers whose experts lie on several ranks: what one rank computes, keeps and exchanges."""

from dataclasses import dataclass, field, replace

from amp_ray.clusters.constants import Constants
from amp_ray.models.model import Layer, Model
from amp_ray.strategies.candidate import StageOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLayouts:
    """A model as the ranks of a stage see it, by how its experts are spread."""

    model: Model  # its experts on every replica, divided by tp as other weights are
    constants: Constants  # how uneven routing is
    _known: dict[tuple[int, int, int], Model] = field(init=False, default_factory=dict)

    def of(self, options: StageOptions) -> Model:
        """Return the model of which tp divides each layer into what a rank of a stage has.

        Args:
            options: Of the stage; without experts that are spread the model is the given one.
        """
        if not options.spreads_experts:
            return self.model
        key = options.tp, options.ep, options.expert_tp
        if key not in self._known:
            load = self.constants.expert_imbalance if options.ep > 1 else 1.0
            distinct, positions = self.model.distinct_layers
            layers = [_spread(layer, options, max(load, 1.0)) for layer in distinct]
            chain = tuple(layers[position] for position in positions)
            self._known[key] = replace(self.model, layers=chain)
        return self._known[key]


def _spread(layer: Layer, options: StageOptions, load: float) -> Layer:
    """Return a layer with the experts of one rank out of several."""
    if layer.experts is None:
        return layer
    here = layer.experts.operators()
    first = layer.operators.index(here[0])
    spread = layer.experts.spread(tp=options.tp, ep=options.ep, etp=options.expert_tp, load=load)
    operators = (*layer.operators[:first], *spread, *layer.operators[first + len(here) :])
    return replace(layer, operators=operators)
