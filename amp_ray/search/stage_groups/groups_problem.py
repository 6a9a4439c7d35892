"""Stage groups as a partition problem, from the last stage to the first.

The number of micro-batches in flight at a stage depends on the stages behind it, so the search
chooses the last stage first: layers are counted from the end of the model, and in state 0 no device
is taken. A state also includes the group taken last if the exact time of the next cut is needed,
and the number of stages if memory is short.

`best_groups` finds the best groups and cuts by branch and bound. The cost of a cut depends on the
groups on both sides. A first problem charges every cut its lower bound, which gives lower bounds
for plans with each group. Only groups that may belong to a better plan than the best so far are
solved again, with the exact costs of their pairs.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import prefix_sums
from amp_ray.memo import memoised
from amp_ray.partition.exact import Chain
from amp_ray.partition.problem import InfeasiblePartition, PartitionProblem, PrunedPartition
from amp_ray.partition.resources import labelled
from amp_ray.partition.rows import distinct_rows
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    among_options,
    option_values,
    solve_with_step_end,
)
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables
from amp_ray.search.cuts import latest_starts
from amp_ray.search.effort import SearchEffort
from amp_ray.search.stage_groups.group_options import Choices, GroupCosts
from amp_ray.search.stage_groups.groups_objective import CutPrices
from amp_ray.strategies.candidate import Candidate, GroupsCandidate, StageOptions
from amp_ray.strategies.strategy import Strategy

Need = tuple[StageOptions, int, float]
"""Options of a stage, samples of a rank, and bytes of its device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimits:
    """Memory limits of a stage, by its position from the end of the pipeline."""

    cost_model: CostModel  # computes the memory of ranks
    candidate: GroupsCandidate  # micro-batch size and number, options of all stages
    most_stages: int
    capped: bool = False  # whether there could be more stages than that
    # Whether to leave out stages near a limit, if only some of them fit
    strict: bool = False
    # Earliest starts that fit, shape ``(num_positions, num_layers + 1)`` each; position 0 is the
    # last stage. Layers are counted from the end of the model.
    tables: list[IntArray] = field(init=False, default_factory=list)
    _rows: dict[tuple[Need, ...], int] = field(init=False, default_factory=dict)
    _start_tables: dict[Need, IntArray] = field(init=False, default_factory=dict)

    @cached_property
    def num_positions(self) -> int:
        """Number of positions from the end at which micro-batches in flight differ."""
        return min(self.most_stages, self.candidate.num_micro_batches)

    @memoised
    def row(self, options: StageOptions, needs: tuple[tuple[int, float], ...]) -> int:
        """Return the index of a stage's limits, and add them if they are new.

        If its data-parallel ranks shard nothing, any dp above 1 gives the same row. ``needs`` are
        the samples of its distinct ranks, and the bytes of their devices.
        """
        if options.num_shards == 1:
            options = replace(options, dp=min(options.dp, 2))
        key = tuple((options, *need) for need in needs)
        if key not in self._rows:
            self._rows[key] = len(self.tables)
            worst: IntArray = np.max([self._starts(need) for need in key], axis=0)
            self.tables.append(worst)
        return self._rows[key]

    @cached_property
    def latest_start(self) -> IntArray:
        """Latest start of stages that need parameters, by end."""
        forwards = latest_starts(self.cost_model.experiment)
        if not len(forwards):
            return forwards
        num_layers = self.cost_model.experiment.model.num_layers
        has = np.flatnonzero(forwards[1:] == np.arange(num_layers))
        last = np.full(num_layers + 1, -1)
        for layer in has[::-1].tolist():
            last[num_layers - layer :] = num_layers - layer - 1
        return last

    def _starts(self, need: Need) -> IntArray:
        """Return the earliest starts with which a stage with one kind of rank fits."""
        options, samples, limit_bytes = need
        if need not in self._start_tables:
            candidate = Candidate(
                micro_batch_size=samples,
                options=options,
                pp=self.num_positions,
                num_micro_batches=self.candidate.num_micro_batches,
            )
            memory = self.cost_model.memory(candidate)
            limits = np.full(self.num_positions, limit_bytes)
            starts = memory.earliest_starts(limits, from_first=False)
            # A stage with all layers has a tied weight only once, so it may fit where others do not
            num_layers = starts.shape[1] - 1
            last = self.num_positions - 1
            whole = memory.peak(last, 0, num_layers) <= limit_bytes
            self._start_tables[need] = self._backwards(starts, whole=whole)[::-1]
        return self._start_tables[need]

    def _backwards(self, starts: IntArray, *, whole: bool) -> IntArray:
        """Convert earliest starts by end to layers counted from the end of the model."""
        num_layers = starts.shape[1] - 1
        first, end = np.ogrid[: num_layers + 1, : num_layers + 1]
        fits = (starts[:, None, :] <= first) & (end > first)
        fits[-1, 0, num_layers] |= whole
        if self.strict:
            fits = np.logical_and.accumulate(fits | (end <= first), axis=2) & (end > first)
        last = np.where(fits, end, first).max(axis=2)
        turned: IntArray = (num_layers - last)[:, ::-1]
        return turned


NO_CHOICE: Final = -1
"""No next stage: this is the last one."""


Edges = tuple[IntArray, IntArray, tuple[IntArray, IntArray], tuple[int, ...]]
"""Choices, their positions, the states that they lead from and to, and the final states."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Options of a partition problem: choices, with the next stage if states include it."""

    choice: IntArray  # shape ``(E,)``
    # Shape ``(E,)``. The choice of the next stage in the pipeline; -1 for none, or if states do not
    # include it.
    after: IntArray
    position: IntArray  # shape ``(E,)``. Index into `MemoryLimits.starts`.
    is_first: BoolArray  # shape ``(E,)``. Whether a pipeline may begin with it.
    from_state: IntArray  # shape ``(E,)``
    to_state: IntArray  # shape ``(E,)``
    final_states: tuple[int, ...]  # states after the first stage of a pipeline


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupsProblem:
    """All plans of one candidate."""

    costs: GroupCosts
    choices: Choices  # possible stages
    limits: MemoryLimits
    # Whether states count the stages to the end; else use the memory limits of the shortest
    # pipeline
    counted: bool
    # Whether states include the group behind a cut; else cuts cost their lower bounds
    joined: bool

    @property
    def effort(self) -> SearchEffort:
        """Limits of the search."""
        return self.costs.device_groups.effort

    @cached_property
    def steps(self) -> Steps:
        """Options of the partition problem, with their states."""
        choices = self.choices
        choice, position, ends, finals = self._counted() if self.counted else self._uncounted()
        if self.costs.device_groups.tied_parameters or self._blocks:
            choice, position, ends, finals = _apart(choice, position, ends, finals)
        if not self.joined:
            return Steps(
                choice=choice,
                after=np.full(len(choice), NO_CHOICE),
                position=np.minimum(position, self.limits.num_positions - 1),
                is_first=np.isin(ends[1], finals),
                from_state=ends[0],
                to_state=ends[1],
                final_states=tuple(np.intersect1d(finals, ends[1]).tolist()),
            )
        labels = labelled(*ends, choices.option[choice], finals)
        chosen = choice[labels.edge]
        return Steps(
            choice=chosen,
            after=self._after(choices.from_state[chosen], labels.label),
            position=np.minimum(position[labels.edge], self.limits.num_positions - 1),
            is_first=np.isin(ends[1], finals)[labels.edge],
            from_state=labels.from_state,
            to_state=labels.to_state,
            final_states=labels.final_states,
        )

    @property
    def has_plans(self) -> bool:
        """Whether some choices can be a first stage: all devices may have to work."""
        return bool(self.steps.final_states)

    @cached_property
    def problem(self) -> StepEndProblem:
        """The partition problem."""
        steps = self.steps
        option = self.choices.option[steps.choice]
        cut_s, cut_row = self._cuts()
        starts, memory_row = self._memory(option)
        experiment = self.costs.device_groups.cost_model.experiment
        bottleneck_start_s, bottleneck_end_s, bottleneck_row = self._bottlenecks(cut_s, cut_row)
        rows = np.array([choice.time_row for choice in self.choices.options])
        host_s = np.full(len(option), experiment.constants.host_s_per_micro_batch)
        partition = PartitionProblem(
            tables=StageTables(
                time_prefix_s=prefix_sums(self.costs.layer_s[:, ::-1]),
                cut_time_s=cut_s,
                bottleneck_start_s=bottleneck_start_s,
                bottleneck_end_s=bottleneck_end_s,
                earliest_start=starts,
                latest_start=self.limits.latest_start,
            ),
            options=OptionTable(
                time_row=rows[option],
                from_state=steps.from_state,
                to_state=steps.to_state,
                cut_row=cut_row,
                bottleneck_row=bottleneck_row,
                memory_row=memory_row,
                overhead_s=host_s,
            ),
            num_micro_batches=self.costs.candidate.num_micro_batches,
            final_states=steps.final_states,
        )
        step_ends = np.array(
            [
                (*choice.step_end, self.costs.tied_s(choice.device_group))
                for choice in self.choices.options
            ]
        )
        tps = np.array([choice.tp for choice in self.choices.options])
        is_end = steps.is_first != (self.choices.from_state[steps.choice] == 0)
        step_end = StepEndTerm(
            weight_prefix=prefix_sums(self.costs.device_groups.parameters[None, ::-1])[0],
            s_per_weight=(step_ends[:, 1] / tps)[option],
            fixed_s=step_ends[option, 0] + step_ends[option, 2] * is_end,
        )
        return StepEndProblem(problem=partition, terms=(step_end,))

    def chosen(self, options: tuple[int, ...]) -> tuple[int, ...]:
        """Return the choices of a solution, from the first stage.

        ``options`` are those of the problem, from the last stage.
        """
        return tuple(self.steps.choice[list(options)][::-1].tolist())

    def strategy(self, bounds: tuple[int, ...], options: tuple[int, ...]) -> Strategy:
        """Convert a solution into a strategy; a uniform strategy has no shares.

        ``bounds`` begin at the last layer, ``options`` at the last stage.
        """
        chosen = self.chosen(options)
        ends = [bounds[-1] - bound for bound in bounds[::-1]]
        groups = [self.choices.options[self.choices.option[choice]] for choice in chosen]
        devices = map(self.choices.devices, chosen)
        return Strategy.of_groups(
            ends,
            [
                (group.options, group.shares, row)
                for group, row in zip(groups, devices, strict=True)
            ],
            num_micro_batches=self.costs.candidate.num_micro_batches,
        )

    def _uncounted(self) -> Edges:
        """Return every choice once; positions are 0 for a last stage and 1 for any other."""
        choices = self.choices
        return (
            np.arange(len(choices.edge)),
            np.minimum(choices.from_state, 1),
            (choices.from_state, choices.to_state),
            choices.graph.final_states,
        )

    def _counted(self) -> Edges:
        """Return every choice once for every position that changes its memory limit."""
        choices, num_states = self.choices, self.choices.graph.num_states
        limits = self.limits
        counted = limits.most_stages if limits.capped else limits.num_positions
        rows = []
        for before in range(counted + (not limits.capped)):
            allowed = np.flatnonzero((choices.from_state > 0) == (before > 0))
            ends = (
                choices.from_state[allowed] + num_states * before,
                choices.to_state[allowed] + num_states * min(before + 1, counted),
            )
            rows.append(np.stack([allowed, np.full(len(allowed), before), *ends]))
        choice, position, from_state, to_state = np.concatenate(rows, axis=1)
        finals = tuple(
            state + num_states * number
            for number in range(1, counted + 1)
            for state in choices.graph.final_states
        )
        return choice, position, (from_state, to_state), finals

    def _after(self, states: IntArray, labels: IntArray) -> IntArray:
        """Return the choice that leads to each state with an option; -1 if there is none."""
        choices, span = self.choices, len(self.choices.options)
        keys = choices.to_state * span + choices.option
        order = np.argsort(keys, kind="stable")
        index = np.searchsorted(keys[order], states * span + labels)
        place = order[np.minimum(index, len(order) - 1)]
        return np.where(labels < 0, NO_CHOICE, place)

    def _cuts(self) -> tuple[FloatArray, IntArray]:
        """Return times of cuts by boundary from the end, and the row of each option."""
        steps = self.steps
        row = np.full(len(steps.choice), NO_ROW)
        inner = np.flatnonzero(self.choices.from_state[steps.choice] > 0)
        if not len(inner):
            return np.empty(0), row
        if self.joined:
            seconds, row[inner] = self._prices.rows(steps.choice[inner], steps.after[inner])
        else:
            seconds, row[inner] = self._prices.least_rows(steps.choice[inner], behind=True)
        return np.ascontiguousarray(seconds[:, ::-1]), row

    def _bottlenecks(
        self, cut_s: FloatArray, cut_row: IntArray
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return the blocking transfers at both ends of stages, and the row of each option.

        The cut behind a stage has its exact time, the cut before it a lower bound.
        """
        if not self._blocks:
            return np.empty(0), np.empty(0), np.empty(0, np.int64)
        steps = self.steps
        inner = np.flatnonzero(~steps.is_first)
        nothing = np.zeros((1, self.costs.device_groups.cost_model.experiment.model.num_layers + 1))
        behind_s = np.vstack([cut_s, nothing]) if len(cut_s) else nothing
        before_s, before_row = nothing, np.zeros(len(cut_row), np.int64)
        if len(inner):
            least_s, least_row = self._prices.least_rows(steps.choice[inner], behind=False)
            before_s = np.vstack([nothing, least_s[:, ::-1]])
            before_row[inner] = least_row + 1
        first, row = distinct_rows([cut_row, before_row])
        behind_s, before_s = behind_s[cut_row[first]], before_s[before_row[first]]
        # No stage with a cut reaches these columns; as here, the solver need not try every start
        behind_s[:, 0], before_s[:, -1] = behind_s[:, 1], before_s[:, -2]
        return behind_s, before_s, row

    @cached_property
    def _prices(self) -> CutPrices:
        model = self.costs.device_groups.cost_model.messages
        return CutPrices(choices=self.choices, model=model)

    @property
    def _blocks(self) -> bool:
        return self.costs.device_groups.cost_model.experiment.traits.blocking_transfers

    def _memory(self, option: IntArray) -> tuple[IntArray, IntArray]:
        """Return the different memory limits, and the row of each option."""
        row = np.zeros(len(self.choices.options), np.int64)
        for index in np.unique(option).tolist():
            group = self.choices.options[index]
            row[index] = self.limits.row(group.options, group.needs)
        tables = np.array(self.limits.tables)
        memory_row: IntArray = row[option] * tables.shape[1] + self.steps.position
        return tables.reshape(-1, tables.shape[2]), memory_row


def _apart(
    choice: IntArray,
    position: IntArray,
    ends: tuple[IntArray, IntArray],
    finals: tuple[int, ...],
) -> Edges:
    """Add a copy of every choice that may be the first stage, which leads to one final state."""
    end = int(ends[1].max(initial=0)) + 1
    first = np.flatnonzero(np.isin(ends[1], finals))
    return (
        np.concatenate((choice, choice[first])),
        np.concatenate((position, position[first])),
        (
            np.concatenate((ends[0], ends[0][first])),
            np.concatenate((ends[1], np.full(len(first), end))),
        ),
        (end,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BestGroups:
    """The best plan of a problem so far."""

    lower_bound_s: float  # on the objective of any plan, without host time
    value_s: float = math.inf  # the objective of the plan; infinite without one
    strategy: Strategy | None = None  # the plan; None if there is none below the upper bound
    chosen: tuple[int, ...] = ()  # its choices, from the first stage
    # Further plans of the search, and their objectives
    other_plans: tuple[tuple[float, Strategy], ...] = ()


def best_groups(problem: GroupsProblem, *, upper_bound_s: float) -> BestGroups:
    """Find the best plan.

    The first problem ignores neighbours, so it gives a lower bound for plans with each group. The
    groups with the smallest bounds are solved with exact cuts, which gives a good plan; then all
    groups whose bound is below the cost of that plan. Plans that cost more than ``upper_bound_s``
    are pruned. If all are pruned, the lower bound may be as low as the upper bound.
    """
    if not problem.has_plans:
        return BestGroups(lower_bound_s=math.inf)
    relaxed = solve_with_step_end(
        problem.problem,
        upper_bound_s=upper_bound_s,
        most_boxes=problem.effort.max_relaxed_boxes,
    )
    if isinstance(relaxed, InfeasiblePartition):
        return BestGroups(lower_bound_s=math.inf)
    if isinstance(relaxed, PrunedPartition):
        return BestGroups(lower_bound_s=relaxed.lower_bound_s)
    search = _Search(
        problem=problem,
        relaxed=relaxed,
        upper_bound_s=upper_bound_s,
        bound_s=relaxed.lower_bound_s,
        best=BestGroups(lower_bound_s=relaxed.lower_bound_s),
    )
    search.run()
    return search.best


@dataclass(slots=True, kw_only=True)
class _Search:
    problem: GroupsProblem
    relaxed: StepEndSolution
    upper_bound_s: float  # plans that cost more are pruned
    bound_s: float  # no plan costs less
    best: BestGroups  # the best plan so far

    def run(self) -> None:
        """Solve joined problems: first few groups for a good plan, then all that may be better."""
        effort, choices = self.problem.effort, self.problem.choices
        self._join(np.unique(self.problem.steps.choice[list(self.relaxed.options)]))
        values = plan_values(self.problem, self._prune_s())
        if self.bound_s < self._prune_s() and not choices.graph.is_small:
            is_aligned = choices.graph.aligned[choices.edge]
            aligned = np.where(is_aligned, values, math.inf)
            most = effort.max_neighbours
            limit_s = self._prune_s()
            self._join(cheapest_choices(self.problem, aligned, limit_s=limit_s, most=most)[0])
        for most in (effort.few_neighbours, effort.max_neighbours):
            limit_s = self._prune_s()
            if self.bound_s >= limit_s:
                break
            chosen, left_s = cheapest_choices(self.problem, values, limit_s=limit_s, most=most)
            proven_s = self._join(chosen)
            self.bound_s = max(self.bound_s, min(left_s, proven_s))
        self.best = replace(self.best, lower_bound_s=min(self.bound_s, self.best.value_s))

    def _prune_s(self) -> float:
        """Return the objective above which plans are pruned."""
        return min(self.upper_bound_s, self.best.value_s)

    def _join(self, chosen: IntArray) -> float:
        """Solve for some choices; keep a better plan, and return their lower bound."""
        if not len(chosen):
            return self._prune_s()
        joined = replace(self.problem, choices=self.problem.choices.among(chosen), joined=True)
        if not joined.has_plans:
            return self._prune_s()
        pairs, kept = joined.problem, np.arange(len(joined.steps.choice))
        if len(kept) > self.problem.effort.few_neighbours:
            kept = np.flatnonzero(option_values(pairs, self._prune_s()) < math.inf)
            fewer = among_options(pairs, kept)
            if fewer is None:
                return self._prune_s()
            pairs = fewer
        met: list[Chain] = []
        solution = solve_with_step_end(
            pairs,
            upper_bound_s=self._prune_s(),
            most_boxes=self.problem.effort.max_boxes,
            met=met,
        )
        other_plans = *self.best.other_plans, *plans_of(joined, met, kept)
        self.best = replace(self.best, other_plans=other_plans)
        if not isinstance(solution, StepEndSolution):
            return self._prune_s()
        if solution.value_s < self.best.value_s:
            options = tuple(kept[list(solution.options)].tolist())
            self.best = BestGroups(
                strategy=joined.strategy(solution.bounds, options),
                chosen=tuple(chosen[list(joined.chosen(options))].tolist()),
                value_s=solution.value_s,
                lower_bound_s=self.relaxed.lower_bound_s,
                other_plans=other_plans,
            )
        return solution.lower_bound_s


def plans_of(
    joined: GroupsProblem, met: Iterable[Chain], kept: IntArray
) -> Iterator[tuple[float, Strategy]]:
    """Yield plans of a solver's chains with their objectives, smallest first.

    ``kept`` are the options of the problem for those of the solver.
    """
    for value_s, bounds, options in islice(sorted(set(met)), joined.effort.max_met_plans):
        yield value_s, joined.strategy(bounds, tuple(kept[list(options)].tolist()))


def plan_values(problem: GroupsProblem, limit_s: float) -> FloatArray:
    """Return a lower bound of the cost of plans with each choice; infinite above the limit."""
    values = np.full(len(problem.choices.edge), np.inf)
    np.minimum.at(values, problem.steps.choice, option_values(problem.problem, limit_s))
    return values


def cheapest_choices(
    problem: GroupsProblem, values: FloatArray, *, limit_s: float, most: int
) -> tuple[IntArray, float]:
    """Return the choices with the smallest values, and a lower bound on plans with any other.

    ``most`` limits the pairs of choices that can follow each other.
    """
    order = np.argsort(values, kind="stable")
    order = order[values[order] <= limit_s]
    positions = problem.limits.num_positions if problem.counted else 1
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if problem.choices.among(order[:middle]).num_neighbours * positions <= most:
            low = middle
        else:
            high = middle - 1
    left_s = float(values[order[low]]) if low < len(order) else math.inf
    return np.sort(order[:low]), left_s
