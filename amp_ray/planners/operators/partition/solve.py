"""The exact solver for chains of operators.

Every stage gets a lower bound on its time, in which its recompute is relaxed to fractions of
patterns. A dynamic programme over (stages behind, devices behind, operators left), inside a search
over caps on the slowest stage, finds the best chain of such stages, which bounds the objective from
below. The stages that could be in a chain better than the best known one are then priced exactly,
the most promising first, until bound and value meet.

To find a good chain early, the search first allows cuts only at the starts of a few layers, then at
the starts of all layers, then at operators around the cuts of the best chain, and last at all
operators. The best value of each round limits the stages that the next one prices.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.caps import CapSearch
from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason, PrunedPartition
from amp_ray.planners.operators.partition.kernels import (
    cheapest_operators,
    fill_most,
    fill_stages,
    fill_through,
    least_slowest,
    stage_end_s,
    trim_rows,
    walk_stages,
)
from amp_ray.planners.operators.partition.layout import (
    blocks_within,
    front_within,
    laid_out,
    layer_kinds,
)
from amp_ray.planners.operators.partition.problem import (
    OperatorProblem,
    OperatorSolution,
    OperatorStage,
)
from amp_ray.planners.operators.partition.programme import Blocks, OperatorProgramme
from amp_ray.planners.operators.partition.stages import StagePrices

FEW_CUTS = 32
FEWER = 6
EVERY = 3
FIRST_PRICED = 64
MOST_PRICED = 24_000
MOST_STEP_ENDS = 40
STEP_END_GAP = 2**-10  # relative accuracy of the least step end

# Start, end, option, devices in front, stages behind.
Place = tuple[int, int, int, int, int]


def solve_operators(
    problem: OperatorProblem, *, upper_bound_s: float = math.inf
) -> OperatorSolution | InfeasiblePartition | PrunedPartition:
    """Find the stages with the smallest objective.

    Step ends are left out at first: the best stages by the other terms give a lower bound. A chain
    with a longer step end than theirs costs more, so the search goes on with shorter step ends
    only, until the most that a shorter one can save is less than the extra time of the stages.

    Returns:
        The best stages with a lower bound; or the reason why there are none; or, if all chains cost
        more than ``upper_bound_s``, that the problem was pruned.
    """
    return _Search.of(problem).solve(upper_bound_s)


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for the best chain of one problem, round by round."""

    problem: OperatorProblem
    programme: OperatorProgramme
    prices: StagePrices

    @classmethod
    def of(cls, problem: OperatorProblem) -> "_Search":
        kinds = layer_kinds(problem)
        programme = laid_out(problem, kinds)
        prices = StagePrices(problem=problem, programme=programme, kinds=kinds)
        return cls(problem=problem, programme=programme, prices=prices)

    def solve(
        self, upper_bound_s: float
    ) -> OperatorSolution | InfeasiblePartition | PrunedPartition:
        """Solve the problem: first with some cuts, then with all."""
        best = self._with_few_cuts(upper_bound_s)
        detail = f"hold all {self.problem.num_operators} operators within their memory"
        if best is None and upper_bound_s == math.inf and self.problem.is_long:
            # Without a plan as an upper bound, cuts within so many layers take minutes.
            detail = f"no stages that end between layers {detail}; cuts within them were not tried"
            return InfeasiblePartition(reason=InfeasibleReason.NOT_SEARCHED, detail=detail)
        limit_s = upper_bound_s if best is None else min(best.value_s, upper_bound_s)
        best, lower_bound_s = self._by_step_end(best, limit_s)
        if best is not None and best.value_s <= upper_bound_s:
            bounds = lower_bound_s, best.value_s, self._relaxed_s(best.value_s)
            return replace(best, lower_bound_s=min(bounds))
        if upper_bound_s < math.inf:
            least_s = min(lower_bound_s, upper_bound_s)
            return PrunedPartition(lower_bound_s=least_s, num_evaluations=0)
        if self._relaxed_s(math.inf) < math.inf:
            detail = f"no mix that was looked at lets stages {detail}, whatever is recomputed"
            return InfeasiblePartition(reason=InfeasibleReason.NOT_SEARCHED, detail=detail)
        return InfeasiblePartition(
            reason=InfeasibleReason.MEMORY,
            detail=f"no stages {detail}, whatever is recomputed",
        )

    def _relaxed_s(self, value_s: float) -> float:
        """Return a lower bound on chains whose mixes are no options, at most ``value_s``."""
        if self.problem.relaxed is None:
            return value_s
        answer = solve_operators(self.problem.relaxed, upper_bound_s=value_s)
        return value_s if isinstance(answer, InfeasiblePartition) else answer.lower_bound_s

    def _with_few_cuts(self, upper_bound_s: float) -> OperatorSolution | None:
        """Find good stages quickly: cuts at some operators only, step ends added at the end."""
        best: OperatorSolution | None = None
        limit_s = upper_bound_s
        for cuts in _layer_cuts(self.problem):
            best = self._round(cuts, limit_s).run(limit_s, FIRST_PRICED)[0] or best
            limit_s = best.value_s if best else upper_bound_s
        if best is not None:
            cuts = _cuts_near(best, self.problem)
            best = self._round(cuts, limit_s).run(limit_s, FIRST_PRICED)[0] or best
            best = replace(best, value_s=best.value_s + best.step_end_s)
        return best

    def _by_step_end(
        self, best: OperatorSolution | None, limit_s: float
    ) -> tuple[OperatorSolution | None, float]:
        """Find the best stages with any cuts, then those with shorter and shorter step ends.

        The step end is in the value of the best stages, which come with a lower bound.
        """
        problem, bound_s, longest_s = self.problem, math.inf, math.inf
        least_s = lower_s = 0.0
        if problem.step_end_s is not None and limit_s < math.inf:
            least_s = self._least_step_end_s(limit_s, 0.0, limit_s)
        everywhere = self._round(np.arange(problem.num_operators + 1), limit_s - least_s)
        for _ in range(MOST_STEP_ENDS):
            plan, lower_s = everywhere.run(limit_s - least_s, MOST_PRICED)
            if plan is None:
                return best, min(bound_s, lower_s + least_s)
            if plan.value_s + plan.step_end_s < limit_s:
                limit_s = plan.value_s + plan.step_end_s
                best = replace(plan, value_s=limit_s)
            if problem.step_end_s is None:
                return best, lower_s
            bound_s = min(bound_s, lower_s + plan.step_end_s)
            longest_s = math.nextafter(plan.step_end_s, -math.inf)
            least_s = self._least_step_end_s(limit_s, least_s, longest_s)
            if lower_s + least_s >= limit_s:
                return best, bound_s
            everywhere.shorten(replace(self.programme, step_end_cap_s=longest_s))
        return best, min(bound_s, lower_s + least_s)

    def _least_step_end_s(self, limit_s: float, known_s: float, most_s: float) -> float:
        """Return a lower bound on the step end of every chain that costs less than a limit.

        It is at least ``known_s``; step ends above ``most_s`` are of no interest.
        """
        cap_s = most_stage_s(self.problem, limit_s)
        low_s, high_s = known_s, min(most_s, self._most_step_end_s)
        # For long chains the step end is part of the bound.
        gap_s = high_s * STEP_END_GAP ** (2 if self.problem.is_long else 1)
        while high_s - low_s > gap_s:
            middle_s = (low_s + high_s) / 2
            programme = replace(self.programme, step_end_cap_s=middle_s)
            if front_within(cap_s, self.problem, programme)[0, -1] >= self.problem.num_operators:
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    @property
    def _most_step_end_s(self) -> float:
        programme = self.programme
        return float(
            (programme.step_end_prefix_s[:, -1] + programme.step_start_s + programme.tied_s).max()
        )

    def _round(self, cuts: IntArray, limit_s: float) -> "Round":
        search = Round(
            problem=self.problem, programme=self.programme, prices=self.prices, cuts=cuts
        )
        search.begin(limit_s)
        return search


def most_stage_s(problem: OperatorProblem, limit_s: float) -> float:
    """Return an upper bound on the time of a stage in a chain that costs less than a limit.

    The times of a chain's stages add up to at least ``least_s``: the work of all operators, each by
    the option that needs the fewest device seconds, spread over as many devices as the largest
    stage has. They also add up to at least the time of the slowest stage.
    """
    later = problem.num_micro_batches - 1
    work_s = (problem.time_s * problem.devices[:, None]).min(axis=0).sum()
    least_s = float(work_s / problem.devices.max()) * (1 - 1e-9)
    return min(limit_s / (later + 1), (limit_s - least_s) / later if later else math.inf)


def _layer_cuts(problem: OperatorProblem) -> list[IntArray]:
    rounds = [np.append(problem.layer_begin, problem.num_operators)]
    while len(rounds[0]) > FEW_CUTS:
        rounds.insert(0, np.unique(np.append(rounds[0][::FEWER], problem.num_operators)))
    return rounds


def _cuts_near(best: OperatorSolution, problem: OperatorProblem) -> IntArray:
    """List all cuts within a layer of a chain's cuts; if they are most cuts, only some of all."""
    begin = np.append(problem.layer_begin, problem.num_operators)
    cuts = [np.array([0, problem.num_operators])]
    for stage in best.stages[1:]:
        layer = int(np.searchsorted(begin, stage.start, side="right")) - 1
        high = min(layer + 2, len(begin) - 1)
        cuts.append(np.arange(begin[max(layer - 1, 0)], begin[high] + 1))
    near = np.unique(np.concatenate(cuts))
    if 2 * len(near) < problem.num_operators:
        return near
    return np.unique(np.append(begin, np.arange(0, problem.num_operators, EVERY)))


@dataclass(slots=True, kw_only=True)
class _Caps(CapSearch):
    """The search over caps for given stage times."""

    cuts: IntArray
    blocks: Blocks
    stage_s: FloatArray
    most_stages: int
    best_s: FloatArray
    choice: IntArray
    path: list[int] = field(default_factory=list)  # indices of the best chain's stages

    def cheapest(self, cap_s: float) -> tuple[float, float, int, float]:
        cheapest: tuple[float, float, int, float] = cheapest_operators(
            cap_s,
            self.cuts,
            self.blocks.views,
            self.stage_s,
            (1, self.most_stages),
            self.best_s,
            self.choice,
            np.empty(self.most_stages, np.int64),
        )
        return cheapest

    def keep(self, num_stages: int) -> None:
        """Store the chain that is in the kernel's arrays."""
        path = np.empty(num_stages, np.int64)
        walk_stages(num_stages, self.blocks.views, self.stage_s, self.choice, path)
        self.path = path.tolist()


@dataclass(slots=True, kw_only=True)
class Round:
    """The search with one set of allowed cuts."""

    problem: OperatorProblem
    programme: OperatorProgramme
    prices: StagePrices
    cuts: IntArray
    blocks: Blocks = field(init=False)
    lower_s: FloatArray = field(init=False)  # lower bound on the time of each stage
    # Least known time of each stage; infinite before it is priced
    upper_s: FloatArray = field(init=False)
    option: dict[int, int] = field(default_factory=dict)  # best option of each priced stage

    def begin(self, limit_s: float) -> None:
        """Bound the times of all stages of chains that cost less than ``limit_s``."""
        cap_s = most_stage_s(self.problem, limit_s)
        self.blocks = blocks_within(cap_s, self.cuts, self.problem, self.programme)
        self._fill(cap_s, limit_s)
        self.upper_s = np.full(len(self.lower_s), np.inf)

    def shorten(self, programme: OperatorProgramme) -> None:
        """Drop stages with a step end above this programme's cap; all bounds remain valid."""
        self.programme = self.prices.programme = programme
        for index, option in list(self.option.items()):
            start, end, *_ = self._place(index)
            if stage_end_s(option, start, end, programme.views) > programme.step_end_cap_s:
                self.upper_s[index] = np.inf
                del self.option[index]

    def run(self, limit_s: float, most_priced: int) -> tuple[OperatorSolution | None, float]:
        """Find the best chain with these cuts.

        Only chains below ``limit_s``, not above the limit of `begin`, are searched; ``most_priced``
        limits the number of stages priced exactly, approximately. Return also a lower bound on all
        chains that cost less than the limit.
        """
        best, priced = None, 0
        chunk = FIRST_PRICED
        while True:
            relaxed = self._search(self.lower_s, limit_s)
            if not relaxed.path or relaxed.value_s >= limit_s:
                return best, max(relaxed.lower_bound_s, limit_s) if best is None else limit_s
            fresh = [index for index in relaxed.path if index not in self.option]
            self._price(fresh)
            feasible = self._search(self.upper_s, limit_s)
            if feasible.path and feasible.value_s < limit_s:
                best, limit_s = self._solution(feasible), feasible.value_s
            if priced >= most_priced or relaxed.value_s * (1 + self.problem.gap) >= limit_s:
                return best, min(relaxed.lower_bound_s, limit_s)
            chosen = self._promising(relaxed, limit_s, min(chunk, most_priced - priced))
            if not fresh and not chosen:
                return best, min(relaxed.lower_bound_s, limit_s)
            self._price(chosen)
            priced, chunk = priced + len(fresh) + len(chosen), 2 * chunk

    def _fill(self, cap_s: float, limit_s: float) -> None:
        """Bound stages from below; add recompute for stages that a better chain could contain."""
        self.lower_s = np.empty(self.blocks.num_stages)
        fill_stages(
            cap_s, self.cuts, self.blocks.views, self.programme.views, np.zeros(0), self.lower_s
        )
        search = self._search(self.lower_s, limit_s)
        floor_s, later = self._floor_s(search), self.problem.num_micro_batches - 1
        most_s = self._through_s(search, floor_s)
        wanted = most_s < limit_s
        fill_most(cap_s, limit_s, later, floor_s, self.lower_s, most_s)
        most_s = self._kept(wanted, most_s)
        self.lower_s = np.empty(len(most_s))
        fill_stages(cap_s, self.cuts, self.blocks.views, self.programme.views, most_s, self.lower_s)
        self.lower_s = self._kept(self.lower_s < math.inf, self.lower_s)

    def _kept(self, wanted: BoolArray, values: FloatArray) -> FloatArray:
        """Cut each row of stages to the range that holds all wanted ones."""
        blocks = self.blocks
        low, begin = np.empty_like(blocks.row_low), np.empty_like(blocks.row_begin)
        size = trim_rows(wanted, blocks.views, low, begin, values)
        self.blocks = replace(blocks, row_low=low, row_begin=begin)
        return values[:size].copy()

    def _search(self, stage_s: FloatArray, limit_s: float) -> _Caps:
        problem = self.problem
        shape = (problem.most_stages + 1, problem.num_devices + 1, len(self.cuts))
        search = _Caps(
            upper_bound_s=limit_s,
            num_later=problem.num_micro_batches - 1,
            cuts=self.cuts,
            blocks=self.blocks,
            stage_s=stage_s,
            most_stages=problem.most_stages,
            best_s=np.empty(shape),
            choice=np.empty((*shape, 2), np.int64),
        )
        search.run(math.inf)
        return search

    def _promising(self, relaxed: _Caps, limit_s: float, most: int) -> list[int]:
        """List unpriced stages that a better chain could contain, most promising first."""
        through_s = self._through_s(relaxed, self._floor_s(relaxed))
        through_s[list(self.option)] = np.inf
        candidates = np.flatnonzero(through_s < limit_s)
        order = np.argsort(through_s[candidates], kind="stable")
        chosen: list[int] = candidates[order[:most]].tolist()
        return chosen

    def _through_s(self, relaxed: _Caps, floor_s: float) -> FloatArray:
        """Return, per stage, a lower bound on the objective of every chain that contains it."""
        relaxed.cheapest(math.inf)
        later = self.problem.num_micro_batches - 1
        front_s, through_s = np.empty_like(relaxed.best_s), np.empty_like(self.lower_s)
        fill_through(
            self.blocks.views, self.lower_s, later, floor_s, relaxed.best_s, front_s, through_s
        )
        return through_s

    def _floor_s(self, relaxed: _Caps) -> float:
        """Return a lower bound on the slowest stage of any chain."""
        allowed = 1, self.problem.most_stages
        return float(least_slowest(self.blocks.views, relaxed.stage_s, allowed, relaxed.best_s))

    def _price(self, stages: list[int]) -> None:
        for index in stages:
            upper_s, lower_s, best = math.inf, math.inf, 0
            start, end, place, behind, options = self._place(index)
            for option in options:
                known_s, bound_s = self.prices.stage(option, place, behind, start, end, upper_s)
                lower_s = min(lower_s, bound_s)
                if known_s < upper_s:
                    upper_s, best = known_s, option
            self.upper_s[index] = upper_s
            self.lower_s[index] = min(max(self.lower_s[index], lower_s), upper_s)
            self.option[index] = best

    def _place(self, index: int) -> tuple[int, int, int, int, list[int]]:
        """Return start, end, devices in front, stages behind, and options of a stage.

        If several places allow these options, the devices in front are those of one of them.
        """
        blocks, begin = self.blocks, self.blocks.row_begin.reshape(-1)
        row = int(np.searchsorted(begin, index, side="right")) - 1
        table, first = divmod(row, len(self.cuts) + 1)
        start = int(self.cuts[first])
        end = int(self.cuts[blocks.row_low[table, first] + index - begin[row]])
        block = blocks.example[table]
        size, behind = int(blocks.size[block]), int(blocks.behind[block])
        place = self.problem.num_devices - int(blocks.taken[block]) - size
        fits = (self.problem.devices == size) & self.problem.allowed[:, place]
        return start, end, place, behind, np.flatnonzero(fits).tolist()

    def _solution(self, search: _Caps) -> OperatorSolution:
        stages = []
        for index in search.path:
            start, end, _, behind, _ = self._place(index)
            option = self.option[index]
            stages.append(
                OperatorStage(
                    start=start,
                    end=end,
                    option=option,
                    recomputed=self.prices.recomputed(option, behind, start, end),
                    time_s=float(self.upper_s[index]),
                )
            )
        return OperatorSolution(
            stages=tuple(stages),
            value_s=search.value_s,
            slowest_s=search.slowest_s,
            lower_bound_s=0.0,
            step_end_s=max(
                stage_end_s(placed.option, placed.start, placed.end, self.programme.views)
                for placed in stages
            ),
        )
