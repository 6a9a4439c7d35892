"""Token slices of a candidate, chosen together with its cuts.

With ``M`` micro-batches of slices that the slowest stage runs in ``f`` and ``w``, 1F1B takes
about::

    M (sum f + sum w) + (sum over stages / slowest stage - 1) (max f + max w)

The solver finds the best slices for that, among those whose activations fit beside what a stage
holds; slices of a micro-batch are all in flight at once. Cuts are chosen again for the slices, and
slices for the cuts. The event simulation judges the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.samples import largest_share
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices
from amp_ray.partition.slices.problem import packed_index
from amp_ray.search.cuts import best_bounds
from amp_ray.search.token_slices.latency import Granules
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, TokenSlices

GRANULES: Final = 32
"""Of a sequence, where the user does not say how long one is."""

CONTEXTS: Final = 9
"""Lengths of slices at which the price of a token of context is found."""

ROUNDS: Final = 2
"""Choices of cuts for slices, and of slices for cuts."""


def plan_slices(
    cost_model: CostModel, candidate: Candidate, costs: StageCosts, bounds: tuple[int, ...]
) -> Estimate | None:
    """Return the best plan of a candidate with token slices.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees and micro-batches.
        costs: Of the candidate.
        bounds: Cuts to begin with: the best for whole micro-batches.

    Returns:
        An estimate; None where no slices are better than whole micro-batches by the closed form.
    """
    search = _Search(cost_model=cost_model, candidate=candidate, costs=costs)
    if candidate.pp == 1 or search.granules.count == 1:
        return None
    token_slices = search.slices(bounds)
    for _ in range(ROUNDS - 1):
        if token_slices is None:
            return None
        again = search.bounds(token_slices)
        if again == bounds:
            break
        bounds, token_slices = again, search.slices(again)
    if token_slices is None:
        return None
    strategy = replace(Strategy.uniform(candidate, bounds), token_slices=token_slices)
    return cost_model.estimate_from(costs, strategy)


def granules_of(experiment: Experiment) -> Granules:
    """Return where the sequences of an experiment may be cut."""
    tokens = experiment.model.shape.sequence_length
    granularity = experiment.limits.slice_granularity or -(-tokens // GRANULES)
    return Granules(tokens=tokens, granularity=granularity)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """One candidate."""

    cost_model: CostModel
    candidate: Candidate
    costs: StageCosts

    @property
    def granules(self) -> Granules:
        """Where sequences may be cut."""
        return granules_of(self.cost_model.experiment)

    def slices(self, bounds: tuple[int, ...]) -> TokenSlices | None:
        """Return the best slices for given cuts; None if that is the whole micro-batch."""
        whole_s = self.costs.times.at(bounds)[:2].sum(axis=0).max(axis=1)
        tables = self._tables(bounds)
        later = float(whole_s.sum() / whole_s.max()) - 1
        solution = solve_slices(tables, (float(self.candidate.num_micro_batches), later))
        if not isinstance(solution, SliceSolution):
            return None
        ((_, tokens),) = self.granules.in_tokens(solution.slices)
        return None if len(tokens) == 1 else ((self.candidate.micro_batch_size, tokens),)

    def bounds(self, token_slices: TokenSlices) -> tuple[int, ...]:
        """Return the best cuts for given slices: each slice counts as a micro-batch."""
        stages = self.costs.stages
        number = stages.num_micro_batches * len(token_slices[0][1])
        costs = replace(
            self.costs,
            stages=replace(stages, num_micro_batches=number),
            memory=self.costs.memory.sliced(largest_share(token_slices)),
        )
        return best_bounds(self.cost_model.experiment, costs)

    def _tables(self, bounds: tuple[int, ...]) -> SliceTables:
        """Return what slices of the micro-batch take on the slowest stage.

        Context costs as much per token as it does where a slice ends the sequence, and between some
        lengths of slices in proportion.
        """
        granules = self.granules
        size, context = granules.cells
        last = [packed_index(granules.count, own) for own in range(1, granules.count + 1)]
        alone = [packed_index(own, own) for own in range(1, granules.count + 1)]
        lengths = np.union1d(size[last], size[alone])
        alone_s = self._seconds(bounds, [(tokens, 0) for tokens in lengths.tolist()])
        some = np.unique(np.linspace(0, len(lengths) - 1, CONTEXTS).round().astype(np.int64))
        before = (granules.tokens - lengths[some]) // granules.granularity * granules.granularity
        places = zip(lengths[some].tolist(), before.tolist(), strict=True)
        with_s = self._seconds(bounds, list(places))
        added_s = np.maximum(0.0, with_s - alone_s[:, some]) / np.maximum(before, 1)
        # The longest is a whole sequence, before which there is nothing.
        tokens = lengths[some][before > 0]
        per_token_s = np.array([np.interp(lengths, tokens, way[before > 0]) for way in added_s])
        of_cell = np.searchsorted(lengths, size)
        times_s = alone_s[:, of_cell] + per_token_s[:, of_cell] * context
        times_s[:, size > self._most_tokens(bounds)] = np.inf
        return SliceTables(forward_s=times_s[:1], backward_s=times_s[1:])

    def _seconds(self, bounds: tuple[int, ...], places: Sequence[tuple[int, int]]) -> FloatArray:
        """Return forward and backward seconds on the slowest stage, its message included."""
        found = np.empty((2, len(places)))
        for index, (tokens, context) in enumerate(places):
            place = self.candidate.micro_batch_size, tokens, context
            passes_s, sends_s = self.cost_model.slice_seconds(self.costs.stages, bounds, place)
            found[:, index] = passes_s[:2].max(axis=(1, 2)) + sends_s.max(axis=(1, 2))
        return found

    def _most_tokens(self, bounds: tuple[int, ...]) -> int:
        """Return the longest slices with which all stages fit their memory.

        Where none do, all are allowed: the estimate tells by how much they fail.
        """
        granules = self.granules
        low, high = 0, granules.count
        while low < high:
            middle = (low + high + 1) // 2
            share = min(1.0, middle * granules.granularity / granules.tokens)
            peaks = self.costs.memory.sliced(share).peaks(bounds)
            if all(peak <= device.memory_bytes for peak, device in peaks):
                low = middle
            else:
                high = middle - 1
        return low * granules.granularity or granules.tokens
