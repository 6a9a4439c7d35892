"""A planner as another package would add it: Megatron's rule of thumb, with our cost model.

The rule chooses the largest tp that a node allows, the smallest pp that fits in memory, and dp for
the remaining devices (Narayanan et al., arXiv:2104.04473, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.planner import AMP_RAY, Candidates, Planner, PlannerTraits, make_planner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleOfThumb:
    """Plans the grid that the rule chooses, for every micro-batch size."""

    experiment: Experiment
    traits: ClassVar = PlannerTraits(knows_prices=True, has_constants=True)

    @cached_property
    def exact(self) -> Planner:
        """Our planner, which chooses the cuts and estimates the time."""
        return make_planner(self.experiment, AMP_RAY)

    @property
    def relative_error(self) -> float:
        return self.exact.relative_error

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        grids = uniform_candidates(self.experiment)
        widest = max(grid.options.tp for grid in grids)
        chosen: dict[int, Candidate] = {}
        for grid in sorted(grids, key=lambda grid: grid.pp):
            if grid.options.tp == widest and self._fits(grid):
                chosen.setdefault(grid.micro_batch_size, grid)
        return Candidates(required=tuple(chosen.values()) or grids)

    def _fits(self, grid: Candidate) -> bool:
        plan = self.exact.plan(grid)
        return isinstance(plan, Estimate) and plan.feasible

    def plan(self, candidate: AnyCandidate) -> Result:
        return self.exact.plan(candidate)

    def score(self, strategy: Strategy) -> Result:
        return self.exact.score(strategy)

    def why_none(self, results: Sequence[Result]) -> str:
        return self.exact.why_none(results)

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]] | None:
        return self.exact.memory_parts(strategy)

    def timeline(self, strategy: Strategy) -> Timeline | None:
        return self.exact.timeline(strategy)
